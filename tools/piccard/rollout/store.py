"""rollout.json read and written: whole, durably, and by one process at a time."""

from collections.abc import Iterator
from contextlib import contextmanager

from piccard_canary.rollout.course import ENDED, RolloutState
from piccard_contract.home import Service
from piccard_contract.validation import explain
from pydantic import ValidationError

from piccard.durable_file import write_durably
from piccard.errors import OperationError
from piccard.state_store import file_lock

# Seconds that another process may hold the file: as long as a promotion takes.
_WAIT = 30.0


class RolloutStore:
    """The rollout of one service, under way or the last.

    What needs the operators' lock as well takes that one first.
    """

    def __init__(self, service: Service) -> None:
        self.service = service

    def read(self) -> RolloutState | None:
        """The rollout; None where there never was one.

        Raises:
            OperationError: the file cannot be read.
        """
        path = self.service.rollout_file
        try:
            return RolloutState.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            why = explain(error) if isinstance(error, ValidationError) else error
            raise OperationError(
                f"{path} cannot be read ({why}); move it away and set the canary's ratio by hand"
            ) from error

    def under_way(self) -> RolloutState:
        """The rollout that has not ended.

        Raises:
            OperationError: there is none.
        """
        state = self.read()
        if state is None or state.phase in ENDED:
            raise OperationError("no rollout is under way; `piccard rollout start --version N` begins one")
        return state

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else writes the file within the block."""
        with file_lock(self.service.state_folder / "rollout.lock", _WAIT, "changing the rollout"):
            yield

    def write(self, state: RolloutState) -> RolloutState:
        """Replace the file, within `locked`; the state with its new generation."""
        written = state.model_copy(update={"generation": state.generation + 1})
        write_durably(self.service.rollout_file, written.model_dump_json(by_alias=True, indent=2) + "\n")
        return written
