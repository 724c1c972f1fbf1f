"""Starts the server again when it ends by itself; of its models' processes revival.py decides.

Not only its own faults end tritonserver 24.10: when a model's process is killed while it holds a lock in shared memory,
the server's next use of that lock throws (boost's lock_exception, not recoverable) and nothing catches it.
"""

import threading
import time
from collections.abc import Callable
from typing import Protocol

from piccard.end_signals import EndSignals
from piccard.errors import OperationError
from piccard.revival import GOOD_LIFE, pause_after

# Bad runs in a row after which somebody has to look.
LIMIT = 6


class Run(Protocol):
    """One life of the server: 0 where it was told to end, else it ended by itself."""

    def run(self) -> int: ...

    def end(self) -> None: ...


def run_again(
    make: Callable[[], Run],
    tell: Callable[[str], None],
    *,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], bool] | None = None,
) -> int:
    """Run what `make` makes until a signal tells it to end, or it ended by itself too often.

    A signal counts whenever it comes, also while a run that ended by itself is cleared away, or between two runs.

    Args:
        make: a new run each time, since one is used once.
        tell: takes each line for people.
        pause: waits some seconds; whether it was told to end meanwhile.

    Returns:
        0 where it was told to end, 1 where it was given up.

    Raises:
        OperationError: the first start found something missing.
    """
    told = threading.Event()
    runs: list[Run] = []

    def end() -> None:
        told.set()
        for run in runs:
            run.end()

    bad = 0
    with EndSignals(end):
        while True:
            started = clock()
            try:
                runs[:] = [make()]
                # What is told from here on reaches the run; what was told before did not.
                if told.is_set() or runs[0].run() == 0:
                    return 0
            except OperationError as error:
                if bad == 0:
                    raise
                tell(str(error))
            if told.is_set():
                return 0
            bad = 1 if clock() - started >= GOOD_LIFE else bad + 1
            if bad >= LIMIT:
                tell(f"the server ended by itself {bad} times in a row; look at its log")
                return 1
            seconds = pause_after(bad)
            tell(f"starting it again in {seconds:g} s")
            if (pause or told.wait)(seconds):
                return 0
