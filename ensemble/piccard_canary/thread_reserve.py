"""Threads that are used again: starting one costs a request more than all that the router does with it."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

Work = Callable[[], None]


class Handover:
    """Takes work without ever starting a thread on the giver's: one of its own does, from a reserve.

    Args:
        log: takes a sentence where there is no thread left.
    """

    def __init__(self, name: str, reserve: "ThreadReserve", log: Callable[[str], None]) -> None:
        self._reserve = reserve
        self._log = log
        self._given: SimpleQueue[Work] = SimpleQueue()
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def run(self, work: Work) -> None:
        """Have `work` run soon."""
        self._given.put(work)

    def _serve(self) -> None:
        while True:
            work = self._given.get()
            try:
                self._reserve.run(work)
            except RuntimeError as error:
                self._log(f"no thread is left: {error}")
            del work


class ThreadReserve:
    """Runs each piece of work on a thread of its own, at once.

    There is no limit here: work may block for ever, and what limits the work limits the threads. They are daemons, so
    that a blocked one does not keep the process from ending.

    Args:
        name: of the threads.
        keep: idle threads kept for later work.
    """

    def __init__(self, name: str, keep: int = 128) -> None:
        self._name = name
        self._keep = keep
        self._idle = 0
        self._lock = threading.Lock()
        self._waiting: SimpleQueue[Work] = SimpleQueue()

    def run(self, work: Work) -> None:
        """Run `work`, which handles its own exceptions, on an idle thread or a new one.

        Raises:
            RuntimeError: the system has no thread left.
        """
        with self._lock:
            idle = self._idle > 0
            if idle:
                self._idle -= 1
        if not idle:
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()
        # Not as an argument of a new thread, which would hold it for good.
        self._waiting.put(work)

    def _serve(self) -> None:
        while True:
            work = self._waiting.get()
            work()
            # What the work held must not be held by a thread that waits.
            del work
            with self._lock:
                if self._idle >= self._keep:
                    return
                self._idle += 1
