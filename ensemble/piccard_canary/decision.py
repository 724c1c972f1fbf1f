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
    """

    stable: int | None
    ready: Collection[int]
    expected: Collection[int] = ()
    resting: Collection[int] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes.

    Attributes:
        version: serves it first.
        reason: why.
        fallbacks: versions that may take it over, in this order.
        follows_stable: whether it may also go to what the stable link names by then.
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
    kept_from_canary = _header(keys) in _STABLE_WORDS
    falls_back = policy.fallback_policy is not FallbackPolicy.NONE
    passed_over: int | None = None
    if to_canary and policy.canary is not None and policy.canary in fleet.ready and not _rests(policy.canary, fleet):
        backup = (fleet.stable,) if falls_back and fleet.stable not in (None, policy.canary) else ()
        return Decision(policy.canary, reason, tuple(v for v in backup if v is not None), falls_back)
    if to_canary:
        loaded = policy.canary is not None and policy.canary in fleet.ready
        reason = RouteReason.BREAKER_OPEN if loaded else RouteReason.CANARY_UNAVAILABLE
        passed_over = None if policy.canary == fleet.stable else policy.canary
    substitute = _substitute(policy, fleet, kept_from_canary=kept_from_canary)
    if fleet.stable is not None and fleet.stable in fleet.ready:
        if substitute in fleet.ready and substitute is not None and _rests(fleet.stable, fleet, substitute):
            return Decision(substitute, RouteReason.BREAKER_OPEN, (fleet.stable,), falls_back, fleet.stable)
        return Decision(fleet.stable, reason, () if substitute is None else (substitute,), falls_back, passed_over)
    if substitute is not None and substitute in fleet.ready:
        return Decision(substitute, RouteReason.FALLBACK, (), falls_back)
    raise RequestError(ErrorCode.UNAVAILABLE, _missing(fleet), retry_after=RETRY_AFTER)


def successor(decision: Decision, tried: Collection[int], fleet: Fleet) -> int | None:
    """The version that takes a request over after those in `tried` failed it, or None."""
    later = (fleet.stable,) if decision.follows_stable and fleet.stable is not None else ()
    for version in (*decision.fallbacks, *later):
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


def _rests(version: int, fleet: Fleet, other: int | None = None) -> bool:
    """Whether the breaker of `version` sends its requests to `other`, which is stable where nothing else is said."""
    other = fleet.stable if other is None else other
    healthy = other is not None and other != version and other in fleet.ready and other not in fleet.resting
    return healthy and version in fleet.resting


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


def _substitute(policy: Policy, fleet: Fleet, *, kept_from_canary: bool) -> int | None:
    """The canary, where it may serve what was meant for stable."""
    if policy.fallback_policy is not FallbackPolicy.BOTH or kept_from_canary or policy.canary == fleet.stable:
        return None
    return policy.canary


def _loaded(fleet: Fleet) -> str:
    numbers = ", ".join(str(version) for version in sorted(fleet.ready))
    return f"loaded: {numbers}" if numbers else "no version is loaded"


def _missing(fleet: Fleet) -> str:
    if fleet.stable is None:
        return "the stable link names no version; retry, or run piccard doctor"
    return f"stable version {fleet.stable} is not ready; retry"
