"""Open gRPC streams that wait for their next request."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

# Streams that wait at most, and seconds after which one is no longer worth keeping.
MOST = 128
SECONDS = 60.0


class KeptCalls:
    """Calls of a bidirectional method, each for one request at a time.

    Args:
        open: starts a call.
    """

    def __init__(
        self,
        open: Callable[[], Any],
        *,
        most: int = MOST,
        seconds: float = SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open = open
        self._most = most
        self._seconds = seconds
        self._clock = clock
        # Those that waited longest come first.
        self._kept: deque[tuple[float, Any]] = deque()

    def take(self) -> Any:
        """A call for one request: the one that was used last, or a new one."""
        while self._kept:
            _, call = self._kept.pop()
            # A server that ended took its calls along.
            if not call.done():
                return call
        return self._open()

    def give_back(self, call: Any) -> None:
        """Keep a call whose request was answered to its end."""
        now = self._clock()
        self._kept.append((now, call))
        while len(self._kept) > self._most or self._kept[0][0] < now - self._seconds:
            self._kept.popleft()[1].cancel()

    def close(self) -> None:
        """End all that wait."""
        while self._kept:
            self._kept.pop()[1].cancel()
