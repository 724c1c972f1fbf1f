"""Buckets of tokens: one of all tenants together, and one of each tenant. What finds too few in either is refused."""

import math
import threading
import time
from collections.abc import Callable, Mapping

from piccard_contract.claims import OWN_TENANT
from piccard_contract.errors import ErrorCode, RequestError
from piccard_contract.policy import AdmissionLimits, TokenLimit
from piccard_contract.reports import tenant_key
from piccard_contract.request import Charge, GenerateRequest

from piccard_canary.counters import Counters
from piccard_canary.token_bucket import TokenBucket
from piccard_canary.token_cost import Outlook, estimate

# Tenants come with keys, so an operator makes them; of more than these, those that were idle longest begin anew.
MOST_TENANTS = 4096

_WHOSE = {"tenant": "its tenant", "all": "the service, for all tenants together,"}

# What a bucket holds without `burst`, in seconds of its rate.
BURST_SECONDS = 10.0


class TokenLimits:
    """The buckets of one admission process; they begin full with it.

    Args:
        limits: those of now.
        outlook: what a request will meet.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        limits: Callable[[], AdmissionLimits],
        outlook: Callable[[], Outlook],
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._outlook = outlook
        self._counters = counters
        self._clock = clock
        self._lock = threading.Lock()
        self._common: TokenBucket | None = None
        # Name and bucket by tenant key, the one that was used last at the end.
        self._tenants: dict[str, tuple[str, TokenBucket]] = {}
        self._sized: AdmissionLimits | None = None

    def charge(self, tenant: str, request: GenerateRequest) -> Charge | None:
        """Take what a request is expected to cost; None where nothing is limited, or nothing of this tenant's.

        Raises:
            RequestError: OVERLOADED with the seconds until the tokens are there; REQUEST_TOO_LARGE where they never
                will be. Nothing was taken then.
        """
        limits = self._limits()
        if tenant == OWN_TENANT or limits.off:
            return None
        found = self._outlook()
        charge = estimate(request, found)
        with self._lock:
            self._resize(limits)
            now = self._clock()
            own = self._bucket_of(tenant, limits, now, found.load)
            common = self._common_bucket(limits, now, found.load)
            buckets = {name: bucket for name, bucket in (("tenant", own), ("all", common)) if bucket is not None}
            self._check(charge.tokens, buckets)
            for bucket in buckets.values():
                bucket.take(charge.tokens)
        return charge

    def settle(self, back: Mapping[str, int]) -> None:
        """Give back what requests did not come to, and take what they came to beyond it.

        Args:
            back: tenant key -> tokens.
        """
        with self._lock:
            for key, tokens in back.items():
                if self._common is not None:
                    self._common.give_back(tokens)
                if key in self._tenants:
                    self._tenants[key][1].give_back(tokens)

    def follow(self) -> None:
        """Let all buckets follow time, load and policy; to be called now and then, so that idle ones know the load."""
        limits = self._limits()
        if limits.off:
            with self._lock:
                self._resize(limits)
            self._tell(0.0, 0.0, 0.0)
            return
        load = self._outlook().load
        with self._lock:
            self._resize(limits)
            now = self._clock()
            for _, bucket in self._tenants.values():
                bucket.follow(now, load)
            common = self._common_bucket(limits, now, load)
            level, capacity = (common.level, common.capacity) if common is not None else (0.0, 0.0)
        self._tell(level, capacity, load)

    def _tell(self, level: float, capacity: float, load: float) -> None:
        self._counters.gauge("piccard_token_bucket_level").set(level)
        self._counters.gauge("piccard_token_bucket_capacity").set(capacity)
        self._counters.gauge("piccard_token_bucket_load").set(load)

    def _resize(self, limits: AdmissionLimits) -> None:
        """Go by other limits from now on; what is left in a bucket stays there."""
        if limits is self._sized:
            return
        self._sized = limits
        self._common = _resized(self._common, limits)
        for key, (name, bucket) in list(self._tenants.items()):
            if _resized(bucket, limits.of(name)) is None:
                del self._tenants[key]

    def _bucket_of(self, tenant: str, limits: AdmissionLimits, now: float, load: float) -> TokenBucket | None:
        limit = limits.of(tenant)
        if not limit.limited:
            return None
        key = tenant_key(tenant)
        known = self._tenants.pop(key, None)
        bucket = _bucket(limit, now, load) if known is None else known[1]
        self._tenants[key] = tenant, bucket
        if len(self._tenants) > MOST_TENANTS:
            del self._tenants[next(iter(self._tenants))]
        bucket.follow(now, load)
        return bucket

    def _common_bucket(self, limits: AdmissionLimits, now: float, load: float) -> TokenBucket | None:
        if not limits.limited:
            return None
        self._common = self._common or _bucket(limits, now, load)
        self._common.follow(now, load)
        return self._common

    def _check(self, cost: int, buckets: Mapping[str, TokenBucket]) -> None:
        """Raises RequestError where one of the buckets has too few tokens, for the one that is waited for longest."""
        waits = {name: bucket.wait(cost) for name, bucket in buckets.items()}
        short = max(waits, key=lambda name: (cost > buckets[name].most, waits[name]), default=None)
        if short is None or waits[short] == 0.0:
            return
        self._counters.count("piccard_token_refusals_total", bucket=short)
        bucket, whose = buckets[short], _WHOSE[short]
        asked = f"the request asks for about {cost} tokens, prompt and max_tokens together"
        if cost > bucket.most:
            raise RequestError(
                ErrorCode.REQUEST_TOO_LARGE,
                f"{asked}, and {whose} has never more than {bucket.most:.0f} at once; lower max_tokens or shorten the "
                "prompt: the same request again is refused too",
            )
        raise RequestError(
            ErrorCode.OVERLOADED,
            f"{asked}, and {whose} has {bucket.level:.0f} of {bucket.capacity:.0f} now; send it again later, or ask "
            "for fewer",
            # Rounded up, so that they are there by then.
            retry_after=math.ceil(waits[short] * 100) / 100,
        )


def _bucket(limit: TokenLimit, now: float, load: float) -> TokenBucket:
    return TokenBucket(*_size(limit), now=now, load=load)


def _resized(bucket: TokenBucket | None, limit: TokenLimit) -> TokenBucket | None:
    if bucket is None or not limit.limited:
        return None
    bucket.resize(*_size(limit))
    return bucket


def _size(limit: TokenLimit) -> tuple[float, float]:
    """Rate and burst of a limit that there is."""
    assert limit.tokens_per_second is not None
    return limit.tokens_per_second, limit.burst or max(1.0, BURST_SECONDS * limit.tokens_per_second)
