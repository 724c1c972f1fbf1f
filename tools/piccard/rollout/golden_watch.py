"""Has golden prompts answered in a thread of its own, so that no look at a rollout waits for them."""

import threading
from collections.abc import Callable
from typing import Protocol

from piccard_canary.rollout.golden import GoldenComparison

# Asks both versions; ends early once the event is set.
Compare = Callable[[threading.Event], GoldenComparison]


class Golden(Protocol):
    """What both versions of a rollout make of the golden prompts."""

    @property
    def found(self) -> GoldenComparison | None:
        """The newest comparison; None where there is none yet."""
        ...

    def ask(self) -> None:
        """Have the prompts answered, unless they are already, or somebody is at it."""
        ...

    def close(self) -> None:
        """It is not wanted any more."""
        ...


class GoldenWatch:
    """Asks until there is a comparison without a problem, and then no more: the versions would say the same again."""

    def __init__(self, compare: Compare) -> None:
        self._compare = compare
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._found: GoldenComparison | None = None

    @property
    def found(self) -> GoldenComparison | None:
        """The newest comparison; None where there is none yet."""
        return self._found

    def ask(self) -> None:
        """Begin to ask where there is no comparison yet, or the last one has a problem; waits for nothing."""
        answered = self._found is not None and not self._found.problem
        if answered or (self._thread is not None and self._thread.is_alive()):
            return
        self._thread = threading.Thread(target=self._run, name="golden-prompts", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ask no further prompt."""
        self._ending.set()

    def _run(self) -> None:
        try:
            self._found = self._compare(self._ending)
        except Exception as error:
            # A defect must not look like prompts that are not answered yet.
            self._found = GoldenComparison(problem=f"the golden prompts cannot be asked: {error!r}")
