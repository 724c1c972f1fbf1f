"""Whether a version that fails its requests is kept from them: closed, open, half open."""

from dataclasses import dataclass
from enum import StrEnum

from piccard_contract.policy import BreakerLimits

from piccard_canary.sliding_counts import Counts, SlidingCounts


class BreakerState(StrEnum):
    """CLOSED lets requests pass, OPEN none, HALF_OPEN one at a time."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Cause(StrEnum):
    """What opened a breaker."""

    CONSECUTIVE_ERRORS = "consecutive_errors"
    ERROR_SHARE = "error_share"
    PROBE = "probe"


@dataclass(frozen=True, slots=True)
class Turn:
    """When a breaker last opened or closed: `at` is seconds of the clock that all routers of a machine share."""

    at: float = 0.0
    open: bool = False


class Breaker:
    """The breaker of one version. It reads no clock and takes no lock.

    Whatever the clock does, `open_for` seconds after the last look at it requests are tried again.

    Attributes:
        turn: its last opening or closing.
        passed: probes that went well since it opened.
    """

    __slots__ = ("_counts", "_row", "passed", "turn")

    def __init__(self) -> None:
        self.turn = Turn()
        self._counts = SlidingCounts()
        self.passed = 0
        # Errors without a success between them.
        self._row = 0

    def state(self, now: float, limits: BreakerLimits) -> BreakerState:
        """What it does with a request that comes now."""
        self._follow(now)
        if limits.off or not self.turn.open:
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if now - self.turn.at >= limits.open_for else BreakerState.OPEN

    def record(self, now: float, limits: BreakerLimits, *, failed: bool, others: Counts | None = None) -> Cause | None:
        """Take in how a request ended; what opened it, where that did.

        While it is open only probes count: what ends then began before, or could go nowhere else.

        Args:
            others: requests and errors in the same window that other routers met.
        """
        self._follow(now)
        if limits.off or self.turn.open:
            return None
        self._counts.add(now, limits.window, Counts(1, int(failed)))
        self._row = self._row + 1 if failed else 0
        cause = self._cause(now, limits, others or Counts()) if failed else None
        if cause is not None:
            self._change(Turn(now, open=True))
        return cause

    def settle(self, now: float, limits: BreakerLimits, *, failed: bool, others: int = 0) -> Cause | None:
        """Take in how a probe ended: it opens the breaker anew, or is one of those that close it.

        Args:
            others: probes of other routers that went well since it opened.
        """
        self._follow(now)
        if not self.turn.open:
            return None
        if failed:
            self._change(Turn(now, open=True))
            return Cause.PROBE
        self.passed += 1
        self.add_up(now, limits, others)
        return None

    def add_up(self, now: float, limits: BreakerLimits, others: int) -> bool:
        """Close where the probes that went well here and at other routers are enough; whether that changed anything."""
        if not self.turn.open or self.passed + others < limits.probes:
            return False
        self._change(Turn(now, open=False))
        return True

    def adopt(self, now: float, turn: Turn) -> bool:
        """Follow another router, where it opened or closed later than this one did; whether that changed anything."""
        self._follow(now)
        if not self.turn.at < turn.at <= now:
            return False
        self._change(turn)
        return True

    def counts(self, now: float, limits: BreakerLimits) -> Counts:
        """Requests and errors of the window while it is closed, for other routers."""
        return self._counts.totals(now, limits.window)

    def _cause(self, now: float, limits: BreakerLimits, others: Counts) -> Cause | None:
        if limits.consecutive_errors is not None and self._row >= limits.consecutive_errors:
            return Cause.CONSECUTIVE_ERRORS
        seen = self._counts.totals(now, limits.window) + others
        if limits.error_share is None or seen.requests < limits.min_requests:
            return None
        return Cause.ERROR_SHARE if seen.events >= limits.error_share * seen.requests else None

    def _follow(self, now: float) -> None:
        if now < self.turn.at:
            # The clock went back: what is open would be so for as long as it went.
            self.turn = Turn(now, self.turn.open)

    def _change(self, turn: Turn) -> None:
        self.turn = turn
        self._row = self.passed = 0
        self._counts.clear()
