"""How many requests a version had in flight while another one ran: what latencies have to be compared at.

A load at one moment tells little of a stream that lasts for seconds, so its mean over the stream is taken: from the
integral over time, which is read three times a request and never at a token.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadMark:
    """A moment: `integral` is that of requests in flight over time until `at`, request-seconds."""

    at: float
    integral: float


class LoadMeter:
    """Requests in flight by version, and their integrals over time.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._versions: dict[int, _Integral] = {}

    def enter(self, version: int) -> None:
        """A request of `version` begins."""
        with self._lock:
            self._of(version).change(self._clock(), 1)

    def leave(self, version: int) -> None:
        """A request of `version` is over."""
        with self._lock:
            self._of(version).change(self._clock(), -1)

    def mark(self, version: int) -> LoadMark:
        """The present moment of `version`."""
        with self._lock:
            now = self._clock()
            return LoadMark(now, self._of(version).until(now))

    def count(self, version: int) -> int:
        """Requests of `version` in flight."""
        with self._lock:
            return self._of(version).count

    def others(self, version: int) -> int:
        """Requests of other versions in flight."""
        with self._lock:
            return sum(found.count for number, found in self._versions.items() if number != version)

    def _of(self, version: int) -> "_Integral":
        return self._versions.setdefault(version, _Integral(self._clock()))


class _Integral:
    __slots__ = ("_at", "_sum", "count")

    def __init__(self, at: float) -> None:
        self.count = 0
        self._at = at
        self._sum = 0.0

    def change(self, now: float, by: int) -> None:
        self._sum, self._at = self.until(now), now
        self.count += by

    def until(self, now: float) -> float:
        return self._sum + self.count * (now - self._at)


class AttemptLoad:
    """The load of one attempt's version: until its first token, and after it.

    Args:
        requests: of the version by its own report; what this router does not know of came another way.

    Attributes:
        others: requests of other versions in flight when it began.
    """

    __slots__ = ("_elsewhere", "_end", "_first", "_meter", "_start", "_version", "others")

    def __init__(self, meter: LoadMeter, version: int, requests: int) -> None:
        self._meter = meter
        self._version = version
        self._elsewhere = max(0, requests - meter.count(version))
        self.others = meter.others(version)
        meter.enter(version)
        self._start = meter.mark(version)
        self._first: LoadMark | None = None
        self._end: LoadMark | None = None

    def first_token(self) -> None:
        """The first token is here."""
        self._first = self._meter.mark(self._version)

    def end(self) -> None:
        """The attempt is over."""
        self._end = self._meter.mark(self._version)
        self._meter.leave(self._version)

    def waiting(self) -> float | None:
        """Mean load from the start to the first token; None where it never came."""
        return self._mean(self._start, self._first)

    def sending(self) -> float | None:
        """Mean load from the first token until now, or to the end where it is over."""
        return self._mean(self._first, self._end or self._meter.mark(self._version))

    def _mean(self, start: LoadMark | None, end: LoadMark | None) -> float | None:
        if start is None or end is None or end.at <= start.at:
            return None
        return self._elsewhere + (end.integral - start.integral) / (end.at - start.at)
