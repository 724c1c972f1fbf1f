"""Signs of life of an engine, for those who look from outside of its thread."""

from collections.abc import Callable


class Pulse:
    """Counts what an engine gets done. One thread writes it, any may read it.

    Attributes:
        busy: whether the engine is at work.
    """

    __slots__ = ("_beats", "_followed", "busy")

    def __init__(self) -> None:
        self.busy = False
        self._beats = 0
        self._followed: Callable[[], int] = lambda: 0

    @property
    def beats(self) -> int:
        """Grows whenever it gets on: with each round of its loop, and each layer of a step where the model tells."""
        return self._beats + self._followed()

    def follow(self, count: Callable[[], int]) -> None:
        """Add a number that grows while a step gets on, for steps that call nothing back; any thread may ask it."""
        self._followed = count

    def beat(self) -> None:
        """The engine got on."""
        self._beats += 1

    def begin(self) -> None:
        """The engine begins to work."""
        self.busy = True
        self._beats += 1

    def end(self) -> None:
        """A round is over."""
        self.busy = False
        self._beats += 1
