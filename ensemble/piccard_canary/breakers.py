"""The breakers of all versions as one router sees them, with what other routers know."""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from piccard_contract.live_state import Section
from piccard_contract.policy import BreakerLimits
from piccard_contract.process_lock import AlreadyHeldError, ProcessLock
from piccard_contract.reports import BreakerReport

from piccard_canary.availability import LoadedVersion
from piccard_canary.breaker import Breaker, BreakerState, Cause, Turn
from piccard_canary.counters import Counters, version_label
from piccard_canary.sliding_counts import Counts


class Probe:
    """The permit of one request to try a version whose breaker is half open; the kernel frees it with the process."""

    __slots__ = ("_lock", "limits", "pid", "version")

    def __init__(self, lock: ProcessLock, version: int, pid: int, limits: BreakerLimits) -> None:
        self._lock = lock
        self.version = version
        self.pid = pid
        self.limits = limits

    def release(self) -> None:
        """Let the next one try."""
        self._lock.release()


class Breakers:
    """One breaker for each process of a version: one that was started again begins anew, with its breaker closed.

    Args:
        probe_lock: file of the lock that a probe holds; a service has one, so that it probes one request at a time.
    """

    def __init__(self, counters: Counters, probe_lock: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._counters = counters
        self._probe_lock = probe_lock
        self._clock = clock
        self._lock = threading.Lock()
        self._breakers: dict[int, tuple[int, Breaker]] = {}
        self._others: dict[int, Counts] = {}
        # Turn and number of the probes that went well at other routers.
        self._passed: dict[tuple[int, Turn], int] = {}

    def states(self, loaded: Mapping[int, LoadedVersion], limits: BreakerLimits) -> dict[int, BreakerState]:
        """The state of every loaded version that is not closed."""
        now = self._clock()
        found: dict[int, BreakerState] = {}
        with self._lock:
            for number, version in loaded.items():
                state = self._of(number, version.pid).state(now, limits)
                if state is not BreakerState.CLOSED:
                    found[number] = state
        return found

    def probe(self, version: int, pid: int, limits: BreakerLimits) -> Probe | None:
        """The permit to try a version that is half open, or None where another request is trying one."""
        lock = ProcessLock(self._probe_lock)
        try:
            lock.acquire(timeout=0.0)
        except AlreadyHeldError:
            return None
        return Probe(lock, version, pid, limits)

    def record(self, version: int, pid: int, limits: BreakerLimits, *, failed: bool) -> None:
        """Take in how a request ended that was no probe."""
        with self._lock:
            breaker = self._known(version, pid)
            if breaker is None:
                return
            others = self._others.get(version)
            cause = breaker.record(self._clock(), limits, failed=failed, others=others)
            self._tell(version, breaker, cause)

    def settle(self, probe: Probe, *, failed: bool | None) -> None:
        """Take in how a probe ended, None for one that says nothing of the version, and let the next one try."""
        try:
            with self._lock:
                breaker = self._known(probe.version, probe.pid)
                if breaker is not None and failed is not None:
                    others = self._passed.get((probe.version, breaker.turn), 0)
                    cause = breaker.settle(self._clock(), probe.limits, failed=failed, others=others)
                    self._tell(probe.version, breaker, cause)
        finally:
            probe.release()
        outcome = "void" if failed is None else "failed" if failed else "passed"
        self._counters.count("piccard_breaker_probes_total", version=version_label(probe.version), outcome=outcome)

    def share(self, sections: Iterable[Section], own: str, limits: BreakerLimits) -> None:
        """Follow what the living routers but `own` know."""
        others: dict[int, Counts] = {}
        passed: dict[tuple[int, Turn], int] = {}
        now = self._clock()
        with self._lock:
            for section in sections:
                if section.owner == own or not section.alive:
                    continue
                for key, data in section.data.get("breakers", {}).items():
                    told = BreakerReport.model_validate(data)
                    breaker = self._known(int(key), told.pid)
                    if breaker is None:
                        continue
                    others[int(key)] = others.get(int(key), Counts()) + Counts(told.requests, told.errors)
                    turn = Turn(told.turned_at, told.open)
                    passed[int(key), turn] = passed.get((int(key), turn), 0) + told.passed
                    if breaker.adopt(now, turn):
                        self._tell(int(key), breaker, None)
            self._others, self._passed = others, passed
            for version, (_, breaker) in self._breakers.items():
                if breaker.add_up(now, limits, passed.get((version, breaker.turn), 0)):
                    self._tell(version, breaker, None)

    def report(self, limits: BreakerLimits) -> dict[int, BreakerReport]:
        """What other routers, and people, want to know."""
        now = self._clock()
        told = {}
        with self._lock:
            for version, (pid, breaker) in self._breakers.items():
                counts, turn = breaker.counts(now, limits), breaker.turn
                told[version] = BreakerReport(
                    pid=pid,
                    open=turn.open,
                    turned_at=turn.at,
                    state=breaker.state(now, limits).value,
                    requests=counts.requests,
                    errors=counts.events,
                    passed=breaker.passed,
                )
        return told

    def forget(self, known: Collection[int]) -> None:
        """Drop the breakers of versions that there are no more."""
        with self._lock:
            for version in [version for version in self._breakers if version not in known]:
                del self._breakers[version]
                self._gauge(version, 0.0)

    def _of(self, version: int, pid: int) -> Breaker:
        found = self._breakers.get(version)
        if found is None or found[0] != pid:
            if found is not None:
                self._gauge(version, 0.0)
            found = self._breakers[version] = pid, Breaker()
        return found[1]

    def _known(self, version: int, pid: int) -> Breaker | None:
        """The breaker of that very process; what ends late tells of one that is gone."""
        found = self._breakers.get(version)
        return found[1] if found is not None and found[0] == pid else None

    def _tell(self, version: int, breaker: Breaker, cause: Cause | None) -> None:
        if cause is not None:
            label = version_label(version)
            self._counters.count("piccard_breaker_opens_total", version=label, cause=cause.value)
        self._gauge(version, float(breaker.turn.open))

    def _gauge(self, version: int, value: float) -> None:
        self._counters.gauge("piccard_breaker_open", version=version_label(version)).set(value)
