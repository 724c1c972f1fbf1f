"""Steps of which either all are done or none."""

from collections.abc import Callable
from types import TracebackType
from typing import Self


class Steps:
    """Steps with how to undo each; an exception undoes those that were done, the last first.

    Example:
        with Steps() as steps:
            steps.do(lambda: write(new), undo=lambda: write(old))
    """

    def __init__(self) -> None:
        self._undos: list[Callable[[], object]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        for undo in reversed(self._undos):
            try:
                undo()
            except Exception as failure:
                error.add_note(f"undoing a step failed too: {failure}; run `piccard doctor`")

    def do(self, action: Callable[[], object], *, undo: Callable[[], object]) -> None:
        """Do a step. One that fails half way is undone as well, so `undo` must bear that nothing was done."""
        self._undos.append(undo)
        action()
