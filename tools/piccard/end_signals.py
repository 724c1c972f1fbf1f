"""Signals that ask a process to end, heard whenever they come."""

import signal
import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import FrameType
from typing import Any


def end_signals() -> list[signal.Signals]:
    """Signals that end a command in order: also that of a terminal that closes, unless nohup took it away."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hangs_up else [])]


class EndSignals:
    """Within `with EndSignals(end):` a signal that ends a process calls `end`, in a thread of its own.

    A handler interrupts the main thread wherever it is. One that set an Event would wait for ever where the main thread
    holds that event's lock, as it does for a moment in each of its waits; SimpleQueue.put alone is safe there.

    Args:
        end: called once for each signal.
    """

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end
        self._heard: SimpleQueue[bool] = SimpleQueue()
        self._thread = threading.Thread(target=self._listen, name="end-signals", daemon=True)
        self._kept: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "EndSignals":
        self._thread.start()
        self._kept = {number: signal.signal(number, self._hear) for number in end_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._kept.items():
            signal.signal(number, handler)
        self._heard.put(False)
        self._thread.join()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._heard.put(True)

    def _listen(self) -> None:
        while self._heard.get():
            self._end()
