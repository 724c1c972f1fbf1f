"""Signs of life of an engine, for those who look from outside of its thread."""


class Pulse:
    """Counts what an engine gets done. One thread writes it, any may read it.

    Attributes:
        busy: whether the engine is at work.
        beats: grows whenever it gets on: with each round of its loop, and each layer of a step where the runner tells.
    """

    __slots__ = ("beats", "busy")

    def __init__(self) -> None:
        self.busy = False
        self.beats = 0

    def beat(self) -> None:
        """The engine got on."""
        self.beats += 1

    def begin(self) -> None:
        """The engine begins to work."""
        self.busy = True
        self.beats += 1

    def end(self) -> None:
        """A round is over."""
        self.busy = False
        self.beats += 1
