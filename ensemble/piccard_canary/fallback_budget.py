"""How many requests may come to stable, or to previous, instead of the version that they were meant for."""

import threading
import time
from collections.abc import Callable, Iterable

from piccard_contract.errors import ErrorCode, RequestError
from piccard_contract.live_state import Section
from piccard_contract.policy import FallbackLimits

from piccard_canary.decision import RETRY_AFTER
from piccard_canary.sliding_counts import Counts, SlidingCounts


class FallbackBudget:
    """Requests of the last seconds and those of them that were taken over, in all routers together."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._counts = SlidingCounts()
        self._others = Counts()

    def request(self, limits: FallbackLimits) -> None:
        """A request has come, wherever it goes."""
        self._add(limits, Counts(requests=1))

    def note(self, limits: FallbackLimits) -> None:
        """A request is taken over that is not asked about: a stream that has begun is brought to its end."""
        self._add(limits, Counts(events=1))

    def take(self, limits: FallbackLimits, load: float, version: int | None) -> None:
        """Stable or previous is to take a request over.

        Args:
            load: of the one that is to, 0 to 1.
            version: that it is taken from.

        Raises:
            RequestError: OVERLOADED, since that one is busy and more than the share was taken over.
        """
        with self._lock:
            now = self._clock()
            seen = self._counts.totals(now, limits.window) + self._others
            if not _allowed(limits, seen) and load >= limits.load:
                raise RequestError(
                    ErrorCode.OVERLOADED,
                    f"version {version} does not serve this, and the one that may take it over is busy (load"
                    f" {load:.2f}), with {seen.events} of {seen.requests} requests taken over in {limits.window:g} s;"
                    " retry, or raise the policy's fallback_budget",
                    retry_after=RETRY_AFTER,
                    version=version,
                )
            self._counts.add(now, limits.window, Counts(events=1))

    def share(self, sections: Iterable[Section], own: str) -> None:
        """Add what the living routers but `own` tell."""
        others = Counts()
        for section in sections:
            if section.owner != own and section.alive:
                others += Counts(*section.data.get("taken_over", (0, 0)))
        with self._lock:
            self._others = others

    def report(self, limits: FallbackLimits) -> tuple[int, int]:
        """Requests of this router in the window, and those that were taken over."""
        with self._lock:
            counts = self._counts.totals(self._clock(), limits.window)
        return counts.requests, counts.events

    def _add(self, limits: FallbackLimits, counts: Counts) -> None:
        with self._lock:
            self._counts.add(self._clock(), limits.window, counts)


def _allowed(limits: FallbackLimits, seen: Counts) -> bool:
    """Whether one more is within the share, or within what is always free."""
    if limits.ratio is None:
        return True
    most = max(limits.ratio * seen.requests, limits.min_per_second * limits.window)
    return seen.events + 1 <= most
