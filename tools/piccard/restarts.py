"""Starts the server again when it ends by itself; of its models' processes revival.py decides.

Not only its own faults end tritonserver 24.10: when a model's process is killed while it holds a lock in shared memory,
the server's next use of that lock throws (boost's lock_exception, not recoverable) and nothing catches it.
"""

import signal
import threading
import time
from collections.abc import Callable
from typing import Protocol

from piccard.errors import OperationError
from piccard.revival import GOOD_LIFE, pause_after

# Bad runs in a row after which somebody has to look.
LIMIT = 6


class Run(Protocol):
    """One life of the server: 0 where it was told to end, else it ended by itself."""

    def run(self) -> int: ...


def run_again(
    make: Callable[[], Run],
    tell: Callable[[str], None],
    *,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], bool] | None = None,
) -> int:
    """Run what `make` makes until it is told to end, or ended by itself too often.

    Args:
        make: a new run each time, since one is used once.
        tell: takes each line for people.
        pause: waits some seconds; whether it was told to end meanwhile.

    Returns:
        0 where it was told to end, 1 where it was given up.

    Raises:
        OperationError: the first start found something missing.
    """
    wait = pause or _wait_for_signal
    bad = 0
    while True:
        started = clock()
        try:
            if make().run() == 0:
                return 0
        except OperationError as error:
            if bad == 0:
                raise
            tell(str(error))
        bad = 1 if clock() - started >= GOOD_LIFE else bad + 1
        if bad >= LIMIT:
            tell(f"the server ended by itself {bad} times in a row; look at its log")
            return 1
        seconds = pause_after(bad)
        tell(f"starting it again in {seconds:g} s")
        if wait(seconds):
            return 0


def end_signals() -> list[signal.Signals]:
    """Signals that end `piccard serve` in order: also that of a terminal that closes, unless nohup took it away."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hangs_up else [])]


def _wait_for_signal(seconds: float) -> bool:
    told = threading.Event()
    kept = {number: signal.signal(number, lambda *_: told.set()) for number in end_signals()}
    try:
        return told.wait(seconds)
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
