"""Which version serves a request: the order of the rules, and who may take over."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from piccard_canary.decision import Decision, Fleet, decide, successor
from piccard_canary.sticky import position
from piccard_contract.errors import ErrorCode, RequestError
from piccard_contract.policy import FallbackPolicy, Pin, Policy
from piccard_contract.routing import RouteKeys, RouteReason


def choose(
    keys: RouteKeys | None = None,
    *,
    stable: int | None = 1,
    ready: set[int] | None = None,
    resting: tuple[int, ...] = (),
    previous: int | None = None,
    draw: float = 0.5,
    **policy: Any,
) -> Decision:
    """Decide with stable 1 and canary 2, both ready, and 10 % of the traffic on the canary."""
    settings = {"canary": 2, "traffic_ratio": 0.1} | policy
    fleet = Fleet(stable, {1, 2} if ready is None else ready, frozenset({1, 2}), resting, previous)
    return decide(Policy(**settings), keys or RouteKeys(), fleet, lambda: draw)


def test_the_order_of_the_rules() -> None:
    sticky_canary = next(f"user:{n}" for n in range(999) if position("", f"user:{n}") < 0.1)
    everything = RouteKeys(version=1, canary="true", sticky=sticky_canary)

    assert choose(everything).reason is RouteReason.PIN
    assert choose(everything).version == 1
    no_pin = everything.model_copy(update={"version": None, "canary": "false"})
    assert choose(no_pin, draw=0.0) == Decision(1, RouteReason.HEADER, (), True)
    no_header = no_pin.model_copy(update={"canary": None})
    assert choose(no_header, draw=0.9) == Decision(2, RouteReason.STICKY, (1,), True)
    assert choose(RouteKeys(), draw=0.05).reason is RouteReason.RATIO
    assert choose(RouteKeys(), draw=0.05).version == 2
    assert choose(RouteKeys(), draw=0.1).version == 1


@pytest.mark.parametrize(
    ("value", "version"),
    [("true", 2), ("TRUE", 2), (" Always ", 2), ("false", 1), ("Never", 1), ("maybe", None), ("1", None), ("", None)],
)
def test_values_of_the_header(value: str, version: int | None) -> None:
    decision = choose(RouteKeys(canary=value))

    if version is None:
        assert decision.reason is RouteReason.RATIO
    else:
        assert (decision.version, decision.reason) == (version, RouteReason.HEADER)


@given(st.floats(0, 1), st.floats(0, 1, exclude_max=True))
def test_the_ratio_is_met_exactly(ratio: float, draw: float) -> None:
    assert choose(draw=draw, traffic_ratio=ratio).version == (2 if draw < ratio else 1)


@given(st.text(max_size=9), st.floats(0, 1), st.floats(0, 1), st.text(max_size=5))
def test_a_sticky_caller_is_never_moved_back(key: str, one: float, other: float, salt: str) -> None:
    low, high = sorted((one, other))
    keys = RouteKeys(sticky=f"user:{key}")
    before, after = (choose(keys, traffic_ratio=ratio, salt=salt) for ratio in (low, high))

    assert not (before.version == 2 and after.version == 1)
    assert before.reason is after.reason is RouteReason.STICKY


@pytest.mark.parametrize("draw", [0.0, 0.9])
def test_no_canary_is_set(draw: float) -> None:
    assert choose(draw=draw, canary=None) == Decision(1, RouteReason.STABLE, (), True)
    # Between the promotion of the canary and the end of its policy.
    assert choose(draw=draw, canary=1).reason is RouteReason.STABLE


@pytest.mark.parametrize(
    ("keys", "draw"), [(RouteKeys(canary="true"), 0.9), (RouteKeys(), 0.0)], ids=["header", "ratio"]
)
def test_no_canary_is_loaded(keys: RouteKeys, draw: float) -> None:
    for fallback in FallbackPolicy:
        decision = choose(keys, draw=draw, ready={1}, fallback_policy=fallback)
        assert (decision.version, decision.reason) == (1, RouteReason.CANARY_UNAVAILABLE)


def test_asking_for_a_canary_where_none_is_set() -> None:
    assert choose(RouteKeys(canary="true"), canary=None).reason is RouteReason.CANARY_UNAVAILABLE


@pytest.mark.parametrize("canary", [None, "false"])
def test_stable_is_missing(canary: str | None) -> None:
    for stable, ready in ((1, {2}), (None, {2}), (1, set())):
        with pytest.raises(RequestError) as refusal:
            choose(RouteKeys(canary=canary), stable=stable, ready=ready)
        assert refusal.value.code is ErrorCode.UNAVAILABLE
        assert refusal.value.retry_after is not None


@pytest.mark.parametrize("keys", [RouteKeys(canary="true"), RouteKeys(sticky="user:0"), RouteKeys()])
@pytest.mark.parametrize("fallback", FallbackPolicy)
def test_the_breaker_of_the_canary_is_open(keys: RouteKeys, fallback: FallbackPolicy) -> None:
    settings = {"traffic_ratio": 1.0, "fallback_policy": fallback}
    decision = choose(keys, resting=(2,), **settings)
    assert (decision.version, decision.reason, decision.passed_over) == (1, RouteReason.BREAKER_OPEN, 2)
    # Where stable is no better, or not there, nobody is kept from anything.
    for resting, ready in (((1, 2), {1, 2}), ((2,), {2})):
        decision = choose(keys, resting=resting, ready=ready, **settings)
        assert (decision.version, decision.passed_over) == (2, None)
    assert choose(RouteKeys(version=2), resting=(2,)) == Decision(2, RouteReason.PIN)


@pytest.mark.parametrize("fallback", FallbackPolicy)
def test_the_breaker_of_stable_is_open(fallback: FallbackPolicy) -> None:
    decision = choose(resting=(1,), fallback_policy=fallback)
    if fallback is FallbackPolicy.BOTH:
        assert decision == Decision(2, RouteReason.BREAKER_OPEN, (1,), True, passed_over=1)
    else:
        assert (decision.version, decision.reason) == (1, RouteReason.RATIO)
    assert choose(RouteKeys(canary="false"), resting=(1,), fallback_policy=fallback).version == 1


def test_the_canary_stands_in_where_both_may() -> None:
    decision = choose(ready={2}, fallback_policy="both")
    assert (decision.version, decision.reason) == (2, RouteReason.FALLBACK)

    with pytest.raises(RequestError, match="UNAVAILABLE"):
        choose(RouteKeys(canary="false"), ready={2}, fallback_policy="both")


def after_promotion(keys: RouteKeys | None = None, **changes: Any) -> Decision:
    """Decide with stable 2, which version 1 came before, and canary 3."""
    known = {"stable": 2, "previous": 1, "canary": 3, "traffic_ratio": 0.0, "ready": {1, 2, 3}}
    return choose(keys, **(known | changes))


@pytest.mark.parametrize("keys", [RouteKeys(), RouteKeys(canary="false"), RouteKeys(sticky="user:0")])
def test_previous_stands_in_for_a_stable_that_fails(keys: RouteKeys) -> None:
    decision = after_promotion(keys)
    assert (decision.version, decision.fallbacks) == (2, (1,))
    rests = after_promotion(keys, resting=(2,))
    assert rests == Decision(1, RouteReason.BREAKER_OPEN, (2,), True, passed_over=2)
    gone = after_promotion(keys, ready={1, 3})
    assert gone == Decision(1, RouteReason.FALLBACK, (2,), True, passed_over=2)
    # Where it is no better, stable's breaker keeps nobody from anything.
    assert after_promotion(keys, resting=(1, 2)).version == 2


def test_what_the_canary_and_stable_fail_comes_to_previous() -> None:
    wish = RouteKeys(canary="true")
    assert after_promotion(wish) == Decision(3, RouteReason.HEADER, (2, 1), True)
    assert after_promotion(wish, resting=(2, 3)) == Decision(1, RouteReason.BREAKER_OPEN, (2,), True, passed_over=3)
    unloaded = after_promotion(wish, ready={1})
    assert unloaded == Decision(1, RouteReason.CANARY_UNAVAILABLE, (2,), True, passed_over=3)
    # Where no canary is set it was meant for stable.
    none = after_promotion(wish, canary=None, resting=(2,))
    assert none == Decision(1, RouteReason.BREAKER_OPEN, (2,), True, passed_over=2)


def test_previous_comes_before_a_canary_that_may_stand_in_too() -> None:
    assert after_promotion(fallback_policy="both").fallbacks == (1, 3)
    assert after_promotion(fallback_policy="both", resting=(2,)).version == 1
    assert after_promotion(fallback_policy="both", resting=(1, 2)).version == 3
    assert after_promotion(RouteKeys(canary="false"), fallback_policy="both").fallbacks == (1,)


@pytest.mark.parametrize(
    "changes",
    [
        {"fallback_policy": "none"},
        # After a rollback what failed is previous.
        {"previous": 4},
        {"previous": None},
        # The moment between the two halves of a promotion.
        {"previous": 2},
        {"previous": 1, "canary": 1, "ready": {1, 2}},
    ],
    ids=["none", "rollback", "nothing", "half", "canary"],
)
@pytest.mark.parametrize("ready", [{1, 2, 4}, {1, 4}])
def test_who_does_not_stand_in(changes: dict[str, Any], ready: set[int]) -> None:
    changes = {"ready": ready} | changes
    if 2 not in changes["ready"]:
        with pytest.raises(RequestError, match="stable version 2 is not ready"):
            after_promotion(**changes)
        return
    decision = after_promotion(resting=(2,), **changes)
    assert (decision.version, decision.fallbacks, decision.passed_over) == (2, (), None)


def test_a_request_in_flight_goes_by_what_is_stable_when_it_fails() -> None:
    decision = after_promotion(RouteKeys(canary="true"))
    rolled_back = Fleet(1, {1, 2, 3}, previous=2)
    assert successor(decision, [3], rolled_back) == 1
    retired = Fleet(2, {2, 3})
    assert successor(decision, [3, 2], retired) is None


def test_pins() -> None:
    assert after_promotion(RouteKeys(version=2), resting=(2,)) == Decision(2, RouteReason.PIN)
    assert choose(RouteKeys(version=2)) == Decision(2, RouteReason.PIN)
    for keys, policy, code in (
        (RouteKeys(version=2), {"pin": Pin(allowed=False)}, ErrorCode.INVALID_VALUE),
        (RouteKeys(version=9), {}, ErrorCode.VERSION_NOT_FOUND),
        (RouteKeys(version=2), {"ready": {1}}, ErrorCode.UNAVAILABLE),
    ):
        with pytest.raises(RequestError) as refusal:
            choose(keys, **policy)
        assert refusal.value.code is code
    with pytest.raises(RequestError, match="loaded: 1, 2"):
        choose(RouteKeys(version=9))
    with pytest.raises(RequestError, match="no version is loaded"):
        choose(RouteKeys(version=9), ready=set())


keys = st.builds(
    RouteKeys,
    version=st.none() | st.integers(1, 4),
    canary=st.sampled_from([None, "true", "false", "x"]),
    sticky=st.none() | st.text(max_size=4),
)
fleets = st.builds(
    Fleet,
    stable=st.none() | st.integers(1, 4),
    ready=st.frozensets(st.integers(1, 4)),
    expected=st.just(frozenset({1, 2, 3, 4})),
    resting=st.frozensets(st.integers(1, 4)),
    previous=st.none() | st.integers(1, 4),
)
policies = st.builds(
    Policy,
    canary=st.none() | st.integers(1, 4),
    traffic_ratio=st.floats(0, 1),
    fallback_policy=st.sampled_from(FallbackPolicy),
)


@given(policies, keys, fleets, st.floats(0, 1, exclude_max=True))
def test_what_always_holds(policy: Policy, keys: RouteKeys, fleet: Fleet, draw: float) -> None:
    try:
        decision = decide(policy, keys, fleet, lambda: draw)
    except RequestError:
        return
    tried = [decision.version]
    while (following := successor(decision, tried, fleet)) is not None:
        tried.append(following)

    assert set(tried) <= fleet.ready
    assert len(set(tried)) == len(tried) <= 3
    if keys.version is not None:
        assert tried == [keys.version]
    elif keys.canary == "false":
        assert policy.canary not in set(tried) - {fleet.stable}
    if policy.fallback_policy is FallbackPolicy.NONE:
        assert len(tried) == 1
    roles = {fleet.stable, policy.canary} | ({fleet.previous} if stands_in(policy, fleet) else set())
    if decision.reason is RouteReason.BREAKER_OPEN:
        assert decision.passed_over in fleet.resting & fleet.ready
        assert decision.version not in fleet.resting
        assert decision.passed_over in (fleet.stable, policy.canary)
    assert keys.version is not None or set(tried) <= roles
    if policy.fallback_policy is FallbackPolicy.CANARY_TO_STABLE and decision.version == fleet.stable:
        assert set(tried) <= roles - {policy.canary} | {fleet.stable}


def stands_in(policy: Policy, fleet: Fleet) -> bool:
    """Whether previous may serve what was meant for stable, were it loaded."""
    older = fleet.previous is not None and fleet.stable is not None and fleet.previous < fleet.stable
    return older and fleet.previous != policy.canary and policy.fallback_policy is not FallbackPolicy.NONE


promoted = st.builds(
    Fleet,
    stable=st.integers(2, 4),
    ready=st.frozensets(st.integers(2, 4)).map(lambda others: others | {1}),
    resting=st.frozensets(st.integers(1, 4)),
    previous=st.just(1),
)


unpinned = keys.map(lambda made: made.model_copy(update={"version": None}))


@given(policies, unpinned, promoted, st.floats(0, 1, exclude_max=True))
def test_nobody_hears_of_a_stable_that_fails_while_previous_stands_in(
    policy: Policy, keys: RouteKeys, fleet: Fleet, draw: float
) -> None:
    assume(stands_in(policy, fleet))
    decision = decide(policy, keys, fleet, lambda: draw)
    tried = [decision.version]
    while (following := successor(decision, tried, fleet)) is not None:
        tried.append(following)

    assert fleet.previous in tried
    # It serves first only what would come to nothing elsewhere, and the version that failed is told.
    if decision.version == fleet.previous:
        assert decision.passed_over in (fleet.stable, policy.canary)
        assert fleet.stable not in fleet.ready - fleet.resting
    elif fleet.stable in fleet.ready:
        assert tried.index(fleet.stable) < tried.index(fleet.previous)


@given(policies, keys, fleets, st.floats(0, 1, exclude_max=True))
def test_one_that_does_not_stand_in_changes_nothing(policy: Policy, keys: RouteKeys, fleet: Fleet, draw: float) -> None:
    assume(not stands_in(policy, fleet) or fleet.previous not in fleet.ready)
    without = replace(fleet, previous=None)
    try:
        alone = decide(policy, keys, without, lambda: draw)
    except RequestError as refusal:
        with pytest.raises(RequestError, match=re.escape(str(refusal))):
            decide(policy, keys, fleet, lambda: draw)
        return
    decision = decide(policy, keys, fleet, lambda: draw)
    assert (decision.version, decision.reason) == (alone.version, alone.reason)
    for tried in ([], [decision.version], [decision.version, fleet.stable]):
        assert successor(decision, tried, fleet) == successor(alone, tried, without)
