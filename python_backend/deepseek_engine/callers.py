"""Whether the routers that wait for a version's answers still live, and how far they have read."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from piccard_contract.cancel_board import BoardReader
from piccard_contract.process_lock import holder_pid
from piccard_contract.receipts import ReceiptReader, receipts_path
from piccard_contract.request import Attempt

# Seconds that a look is believed: a look costs a few system calls, and every response takes one.
BELIEVED = 0.01


class Callers:
    """Tells the living routers from the dead.

    Triton hands each response to the process that asked for it and waits, for ever where that process has died (seen
    on 24.10). So a version sends a dead router nothing.

    Args:
        lock: the file of an owner's process lock.
        clock: seconds, monotonic.
    """

    def __init__(self, lock: Callable[[str], Path], clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = lock
        self._clock = clock
        self._looks: dict[tuple[str, int], tuple[float, bool]] = {}
        self._receipts = ReceiptReader()
        self._boards = BoardReader(lock("router").parent)

    def gone(self, attempt: Attempt | None) -> bool:
        """Whether the router of an attempt has died; False where none is named."""
        if attempt is None or not attempt.process:
            return False
        key = (attempt.router, attempt.process)
        looked_at, found = self._looks.get(key, (0.0, False))
        if found or (key in self._looks and self._clock() - looked_at < BELIEVED):
            return found
        # Whoever holds the lock after it is another process.
        dead = holder_pid(self._lock(attempt.router)) != attempt.process
        self._looks[key] = (self._clock(), dead)
        return dead

    def cancelled(self, tokens: Iterable[str]) -> list[str]:
        """Those of `tokens` that routers have cancelled since the last look; for one thread alone."""
        return self._boards.posted(tokens)

    def taken(self, attempt: Attempt) -> Callable[[int], bool]:
        """Tells whether the router has taken so many responses of an attempt, or never will, or does not tell."""
        # The slot and the path are found once: this is asked before every response.
        slot, path = attempt.slot, receipts_path(self._lock(attempt.router))

        def took(sent: int) -> bool:
            if slot is None or sent == 0:
                return True
            count = self._receipts.taken(path, attempt.process, slot)
            return count is None or count >= sent or self.gone(attempt)

        return took
