"""The mirrored requests of one router: which are sent, how many at once, and what came of them."""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from random import Random

from piccard_contract.errors import ErrorCode
from piccard_contract.lifecycle import now as time_of_day
from piccard_contract.policy import Policy
from piccard_contract.reports import ShadowReport

from piccard_canary.attempt import Attempt
from piccard_canary.availability import LoadedVersion
from piccard_canary.breaker import BreakerState
from piccard_canary.breakers import Breakers
from piccard_canary.cancel import CancelDesk
from piccard_canary.counters import Counters, version_label
from piccard_canary.load import LoadMeter
from piccard_canary.protocols import VersionClient
from piccard_canary.request_log import RequestLine
from piccard_canary.shadow import Ending, Outcome, Shadow, first_difference

# Threads of mirrored requests that are over, each perhaps blocked on a dead or stuck version, at most.
MOST_LEAVING = 64

# A version may not have met a request yet when its cancel comes; one that is stuck holds each call for ever.
CANCELS = 3

# Positions of first differences that a router tells of a version.
KEPT_DIFFERENCES = 128


@dataclass(slots=True)
class _Tally:
    pairs: int = 0
    compared: int = 0
    agreed: int = 0
    differences: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT_DIFFERENCES))


class Shadows:
    """Sends a share of the requests to a second version as well.

    Nothing of it touches the client: its thread looks at the policy and at numbers that are there, and the rest happens
    on other threads. No failure of a mirrored request counts anywhere but here.

    Args:
        start: runs work on another thread, and returns at once.
        process: tells a version's living process; None where it is dead.
        random: says which requests are mirrored.
    """

    def __init__(
        self,
        name: str,
        client: VersionClient,
        *,
        loaded: Callable[[], Mapping[int, LoadedVersion]],
        process: Callable[[int], int | None],
        cancels: CancelDesk,
        breakers: Breakers,
        counters: Counters,
        meter: LoadMeter,
        write: Callable[[RequestLine], None],
        log: Callable[[str], None],
        start: Callable[[Callable[[], None]], None],
        clock: Callable[[], float] = time.monotonic,
        random: Random | None = None,
    ) -> None:
        self._name = name
        self._client = client
        self._loaded = loaded
        self._process = process
        self._cancels = cancels
        self._breakers = breakers
        self._counters = counters
        self._meter = meter
        self._write = write
        self._log = log
        self._start = start
        self._clock = clock
        self._random = random or Random()
        self._lock = threading.Lock()
        self._running: set[Shadow] = set()
        # Those that are over and whose thread still reads or hangs, with how often they were cancelled.
        self._leaving: dict[Shadow, int] = {}
        self._tallies: dict[int, _Tally] = {}

    def offer(self, policy: Policy, primary: Attempt, outputs: frozenset[str]) -> Shadow | None:
        """Perhaps mirror a request, whose first token is here; it has to be told how that ended."""
        version = policy.shadow_version
        if version is None or version == primary.version or primary.request.sampling.n > 1:
            return None
        if self._random.random() >= policy.shadow.ratio:
            return None
        loaded = self._loaded()
        found = loaded.get(version)
        if found is None or not self._has_room(policy, loaded, found, primary.version):
            self._count(version, "dropped")
            return None
        shadow = Shadow(
            primary,
            found,
            outputs,
            now=self._clock(),
            clock=self._clock,
            log=self._log,
            on_end=self._ended,
        )
        with self._lock:
            full = len(self._running) >= policy.shadow.max_in_flight or len(self._leaving) >= MOST_LEAVING
            if full or self._in_flight(version) >= self._meter.count(primary.version):
                self._count(version, "dropped")
                return None
            self._running.add(shadow)
            self._gauge(version)
        self._start(lambda: self._run(shadow))
        return shadow

    def follow(self, policy: Policy) -> None:
        """Cancel what the policy does not want any more, and give up what hangs; called now and then."""
        now = self._clock()
        with self._lock:
            running = list(self._running)
            again = [shadow for shadow, cancels in self._leaving.items() if cancels < CANCELS]
        for shadow in again:
            self._cancel(shadow)
        for shadow in running:
            attempt = shadow.attempt
            if shadow.version != policy.shadow_version or now - attempt.started > policy.abandoned_limit:
                shadow.end(Outcome.CANCELLED, ErrorCode.CANCELLED.value)
            elif not attempt.ended:
                error = attempt.fault(now, self._process(shadow.version), policy.deadlines)
                if error is not None:
                    shadow.end(Outcome.FAILED, error.code.value)

    def report(self) -> dict[int, ShadowReport]:
        """What came of it, by the version that was mirrored to."""
        with self._lock:
            return {
                version: ShadowReport(
                    pairs=tally.pairs,
                    compared=tally.compared,
                    agreed=tally.agreed,
                    first_differences=list(tally.differences),
                )
                for version, tally in self._tallies.items()
            }

    def forget(self, known: Collection[int]) -> None:
        """Drop what is told of versions that there are no more."""
        with self._lock:
            for version in [version for version in self._tallies if version not in known]:
                del self._tallies[version]

    def _has_room(
        self, policy: Policy, loaded: Mapping[int, LoadedVersion], found: LoadedVersion, primary: int
    ) -> bool:
        """Whether neither version is busy, and the one that is mirrored to is not kept from requests."""
        serving = loaded.get(primary)
        load = max(found.load, serving.load if serving is not None else 0.0)
        states = self._breakers.states({found.version: found}, policy.breaker)
        return load < policy.shadow.load and states.get(found.version, BreakerState.CLOSED) is BreakerState.CLOSED

    def _in_flight(self, version: int) -> int:
        """Requests that a version has in flight; it shall have no more than the one that it is compared with."""
        begun = self._meter.count(version)
        return begun + sum(one.version == version and one.attempt.load is None for one in self._running)

    def _run(self, shadow: Shadow) -> None:
        try:
            # It may have been cancelled before it began.
            if not shadow.over:
                shadow.run(self._client, self._meter)
        except Exception as error:
            self._log(f"shadow of request {shadow.id}: {error!r}")
            shadow.end(Outcome.FAILED, ErrorCode.INTERNAL.value)
        finally:
            with self._lock:
                self._leaving.pop(shadow, None)
                shadow.attempt.ended = True

    def _ended(self, shadow: Shadow, ending: Ending) -> None:
        attempt = shadow.attempt
        with self._lock:
            self._running.discard(shadow)
            self._gauge(shadow.version)
            if not attempt.ended:
                self._leaving[shadow] = CANCELS if ending.code == ErrorCode.VERSION_DIED else 0
        self._cancel(shadow)
        self._count(shadow.version, ending.outcome.value)
        differs = self._compare(ending) if ending.outcome is Outcome.PAIR else None
        if ending.outcome is not Outcome.CANCELLED:
            self._write(self._line(shadow, ending, differs))

    def _cancel(self, shadow: Shadow) -> None:
        """Have its version end it, where it is not through and may still hear of it."""
        with self._lock:
            cancels = self._leaving.get(shadow, CANCELS)
            if cancels >= CANCELS:
                return
            self._leaving[shadow] = cancels + 1
        self._cancels.post(shadow.version, shadow.attempt.stamp.cancel_token)

    def _compare(self, ending: Ending) -> int | None:
        """Count a pair; the position of its first difference, None where there is none or it cannot be told."""
        version, served = ending.shadow.version, ending.served
        assert served is not None
        differs = first_difference(served.token_ids, ending.shadow.token_ids) if ending.comparable else None
        tokens = "uncompared" if not ending.comparable else "agree" if differs is None else "differ"
        label = version_label(version)
        self._counters.count("piccard_shadow_pairs_total", version=label, tokens=tokens)
        if differs is not None:
            self._counters.histogram("piccard_shadow_first_difference_tokens", version=label).observe(differs)
        with self._lock:
            tally = self._tallies.setdefault(version, _Tally())
            tally.pairs += 1
            tally.compared += ending.comparable
            tally.agreed += tokens == "agree"
            if differs is not None:
                tally.differences.append(differs)
        return differs

    def _line(self, shadow: Shadow, ending: Ending, differs: int | None) -> RequestLine:
        answer, served = ending.shadow, ending.served
        told: dict[str, object] = {}
        if served is not None:
            told = {
                "of": served.version,
                "compared": ending.comparable,
                "first_difference": differs,
                "first_token_s": served.first_token,
                "token_gap_s": served.token_gap,
                "first_load": served.first_load,
                "gap_load": served.gap_load,
            }
        return RequestLine(
            at=time_of_day(),
            id=shadow.id,
            router=self._name,
            stream=True,
            version=shadow.version,
            reason=None,
            # Readers that know nothing of shadows pass over what nobody decided.
            decision=None,
            code=ending.code,
            first_token_s=answer.first_token,
            seconds=answer.seconds,
            prompt_tokens=answer.usage.prompt_tokens,
            completion_tokens=answer.usage.completion_tokens or len(answer.token_ids),
            cached_tokens=answer.usage.cached_tokens,
            token_gap_s=answer.token_gap,
            first_load=answer.first_load,
            gap_load=answer.gap_load,
            others=answer.others,
            shadow=told,
        )

    def _count(self, version: int, outcome: str) -> None:
        self._counters.count("piccard_shadow_requests_total", version=version_label(version), outcome=outcome)

    def _gauge(self, version: int) -> None:
        running = sum(shadow.version == version for shadow in self._running)
        self._counters.gauge("piccard_shadow_in_flight", version=version_label(version)).set(running)
