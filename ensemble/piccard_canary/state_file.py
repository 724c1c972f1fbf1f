"""state.json as the ensemble reads it: which versions may serve, in which roles, and which there are at all."""

from pathlib import Path

from piccard_contract.file_watch import FileWatch
from piccard_contract.lifecycle import SERVING_STATES, ServiceState
from pydantic import ValidationError


class StateFile:
    """The file, read again when it changes. Not for several threads at once."""

    def __init__(self, path: Path) -> None:
        self._watch = FileWatch(path)
        self._serving: frozenset[int] | None = None
        self._known: frozenset[int] | None = None
        self._roles: tuple[int, ...] = ()

    def serving(self) -> frozenset[int] | None:
        """Versions in a serving state; None where there was no state.json yet, so that the processes alone decide."""
        self._look()
        return self._serving

    def roles(self) -> tuple[int, ...]:
        """Stable and previous, those of them that are in a serving state."""
        self._look()
        return self._roles

    def known(self) -> frozenset[int] | None:
        """All versions that it names, in whatever state; None where there was no state.json yet."""
        self._look()
        return self._known

    def _look(self) -> None:
        if not self._watch.changed():
            return
        # It is replaced by a rename and so never met halfway; what cannot be read is doctor's to repair.
        try:
            state = ServiceState.model_validate_json(self._watch.path.read_bytes())
        except (OSError, ValidationError):
            return
        serving = (number for number, record in state.versions.items() if record.state in SERVING_STATES)
        self._serving, self._known = frozenset(serving), frozenset(state.versions)
        self._roles = tuple(number for number in (state.stable, state.previous) if number in self._serving)
