"""Which version serves a request, and which may take it over."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from piccard_contract.errors import ErrorCode, RequestError
from piccard_contract.policy import FallbackPolicy, Policy
from piccard_contract.routing import RouteKeys, RouteReason

from piccard_canary.sticky import position

# Seconds after which a client may try again when no version can serve: a revival takes about as long.
RETRY_AFTER = 1.0

_CANARY_WORDS = frozenset({"true", "always"})
_STABLE_WORDS = frozenset({"false", "never"})


@dataclass(frozen=True, slots=True)
class Fleet:
    """The versions as a request finds them.

    Attributes:
        stable: what the link names, or None where it names nothing.
        ready: versions that can serve now.
        expected: versions that are meant to serve; one that is not ready is about to be revived.
        resting: versions whose breaker keeps requests from them.
        previous: what was stable before and still serves, or None.
    """

    stable: int | None
    ready: Collection[int]
    expected: Collection[int] = ()
    resting: Collection[int] = ()
    previous: int | None = None

    def spares(self, version: int) -> bool:
        """Whether `version` takes requests over within the fallback budget alone: callers depend on it themselves."""
        return version in (self.stable, self.previous)


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes.

    Attributes:
        version: serves it first.
        reason: why.
        fallbacks: versions that may take it over, in this order.
        follows_stable: whether it may also go to what the stable link names by then, and to that first.
        passed_over: the version that it was meant for, where that is not loaded or its breaker open.
    """

    version: int
    reason: RouteReason
    fallbacks: tuple[int, ...] = ()
    follows_stable: bool = False
    passed_over: int | None = None


def decide(policy: Policy, keys: RouteKeys, fleet: Fleet, draw: Callable[[], float]) -> Decision:
    """Choose the version of a request: pin, then header, then sticky key, then traffic ratio.

    A breaker sends a request to another version that may serve it and whose own breaker is closed; where there is none
    it keeps nobody from anything, and a pin least of all.

    Args:
        draw: a number in [0, 1), drawn only where chance decides.

    Raises:
        RequestError: INVALID_VALUE where a pin is not allowed, VERSION_NOT_FOUND where the pinned version is not
            loaded, UNAVAILABLE where no version that may serve it is loaded.
    """
    if keys.version is not None:
        return _pinned(policy, keys.version, fleet)
    to_canary, reason = _wish(policy, keys, fleet, draw)
    if to_canary and policy.canary is None:
        to_canary, reason = False, RouteReason.CANARY_UNAVAILABLE
    meant = policy.canary if to_canary else fleet.stable
    substitutes = _substitutes(policy, fleet, kept_from_canary=_header(keys) in _STABLE_WORDS)
    # Stable serves the canary's requests whatever the policy says of those that failed.
    able = [v for v in (meant, fleet.stable, *substitutes) if v is not None and v in fleet.ready]
    if not able:
        raise RequestError(ErrorCode.UNAVAILABLE, _missing(fleet), retry_after=RETRY_AFTER)
    version = next((v for v in able if v not in fleet.resting), able[0])
    if version != meant:
        if meant in fleet.ready:
            reason = RouteReason.BREAKER_OPEN
        else:
            reason = RouteReason.CANARY_UNAVAILABLE if to_canary else RouteReason.FALLBACK
    falls_back = policy.fallback_policy is not FallbackPolicy.NONE
    takers = dict.fromkeys((fleet.stable, *substitutes)) if falls_back else {}
    fallbacks = tuple(v for v in takers if v is not None and v != version)
    return Decision(version, reason, fallbacks, falls_back, None if version == meant else meant)


def successor(decision: Decision, tried: Collection[int | None], fleet: Fleet) -> int | None:
    """The version that takes a request over after those in `tried` failed it, or None."""
    stable = (fleet.stable,) if decision.follows_stable and fleet.stable is not None else ()
    for version in (*stable, *decision.fallbacks):
        if version not in tried and version in fleet.ready:
            return version
    return None


def _pinned(policy: Policy, version: int, fleet: Fleet) -> Decision:
    if not policy.pin.allowed:
        raise RequestError(
            ErrorCode.INVALID_VALUE, "version: the policy does not allow a pin (pin.allowed is false); leave it out"
        )
    if version in fleet.ready:
        return Decision(version, RouteReason.PIN)
    if version in fleet.expected:
        raise RequestError(
            ErrorCode.UNAVAILABLE,
            f"version {version} is being loaded; retry, or leave version out",
            retry_after=RETRY_AFTER,
            version=version,
        )
    raise RequestError(
        ErrorCode.VERSION_NOT_FOUND, f"version {version} is not loaded; {_loaded(fleet)}", version=version
    )


def _wish(policy: Policy, keys: RouteKeys, fleet: Fleet, draw: Callable[[], float]) -> tuple[bool, RouteReason]:
    """Whether the request wants the canary, and what said so."""
    header = _header(keys)
    if header in _CANARY_WORDS:
        return True, RouteReason.HEADER
    if header in _STABLE_WORDS:
        return False, RouteReason.HEADER
    if policy.canary is None or policy.canary == fleet.stable:
        return False, RouteReason.STABLE
    if keys.sticky is not None:
        return position(policy.salt, keys.sticky) < policy.traffic_ratio, RouteReason.STICKY
    return draw() < policy.traffic_ratio, RouteReason.RATIO


def _header(keys: RouteKeys) -> str:
    return "" if keys.canary is None else keys.canary.strip().lower()


def _substitutes(policy: Policy, fleet: Fleet, *, kept_from_canary: bool) -> list[int]:
    """What may serve what was meant for stable: previous first, which has had all of it before, then the canary."""
    found: list[int] = []
    if policy.fallback_policy is FallbackPolicy.NONE:
        return found
    # Who goes back to an older version leaves the newer one for a reason, and that one is previous then.
    previous, stable = fleet.previous, fleet.stable
    if previous is not None and stable is not None and previous < stable and previous != policy.canary:
        found.append(previous)
    if policy.fallback_policy is FallbackPolicy.BOTH and not kept_from_canary and policy.canary is not None:
        found.append(policy.canary)
    return found


def _loaded(fleet: Fleet) -> str:
    numbers = ", ".join(str(version) for version in sorted(fleet.ready))
    return f"loaded: {numbers}" if numbers else "no version is loaded"


def _missing(fleet: Fleet) -> str:
    if fleet.stable is None:
        return "the stable link names no version; retry, or run piccard doctor"
    return f"stable version {fleet.stable} is not ready; retry"
