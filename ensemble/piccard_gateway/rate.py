"""How often a key may be used."""

import time
from collections.abc import Callable


class Rate:
    """A bucket of one minute's requests, which fills evenly.

    Args:
        per_minute: requests a minute; as many may come at once.
    """

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._most = max(1.0, per_minute)
        self._left = self._most
        self._seen = clock()

    def take(self) -> float:
        """Take one request; seconds to wait where there is none left, else 0."""
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._seen) * self.per_minute / 60)
        self._seen = now
        if self._left < 1.0:
            return (1.0 - self._left) * 60 / self.per_minute
        self._left -= 1.0
        return 0.0
