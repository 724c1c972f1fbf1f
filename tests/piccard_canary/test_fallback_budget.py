"""How much stable takes over: never more than its share while it is busy, and everything while it is not."""

from typing import Any

import pytest
from canary_fakes import HandClock
from hypothesis import given
from hypothesis import strategies as st
from piccard_canary.fallback_budget import FallbackBudget
from piccard_contract.errors import ErrorCode, RequestError
from piccard_contract.live_state import Section
from piccard_contract.policy import FallbackLimits

LIMITS = FallbackLimits(ratio=0.2, min_per_second=0.5, window=10.0, load=0.8)
FREE = 5

BUSY, IDLE = 0.8, 0.79


def taken(budget: FallbackBudget, load: float, limits: FallbackLimits = LIMITS) -> bool:
    try:
        budget.take(limits, load, 2)
    except RequestError:
        return False
    return True


def test_a_refusal_says_when_to_come_back_and_for_whom_it_was_meant() -> None:
    budget = FallbackBudget(HandClock())
    none = FallbackLimits(ratio=0.0, min_per_second=0.0)
    with pytest.raises(RequestError) as refusal:
        budget.take(none, BUSY, 2)
    assert refusal.value.code is ErrorCode.OVERLOADED
    assert refusal.value.retry_after is not None
    assert refusal.value.version == 2


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.floats(0, 3)), max_size=80))
def test_a_busy_stable_takes_its_share_and_an_idle_one_all(events: list[tuple[bool, bool, float]]) -> None:
    clock = HandClock()
    budget = FallbackBudget(clock)
    for falls_back, busy, step in events:
        clock.now += step
        budget.request(LIMITS)
        if not falls_back:
            continue
        requests, before = budget.report(LIMITS)
        expected = not busy or before + 1 <= max(0.2 * requests, FREE)
        assert taken(budget, BUSY if busy else IDLE) == expected
        assert budget.report(LIMITS)[1] == before + expected


def test_a_window_later_there_is_room_again() -> None:
    clock = HandClock()
    budget = FallbackBudget(clock)
    assert [taken(budget, BUSY) for _ in range(FREE + 1)] == [True] * FREE + [False]
    clock.now += LIMITS.window * 1.2
    assert taken(budget, BUSY)


def test_no_ratio_is_no_bound() -> None:
    budget = FallbackBudget(HandClock())
    limits = LIMITS.model_copy(update={"ratio": None})
    assert all(taken(budget, 1.0, limits) for _ in range(100))


def test_streams_that_go_on_use_the_budget_up() -> None:
    budget = FallbackBudget(HandClock())
    for _ in range(FREE):
        budget.note(LIMITS)
    assert not taken(budget, BUSY)
    assert taken(budget, IDLE)


@pytest.mark.parametrize(("alive", "owner", "counts"), [(True, "router", True), (False, "router", False)])
def test_what_other_routers_took_counts(alive: bool, owner: str, counts: bool) -> None:
    def section(name: str, **data: Any) -> Section:
        return Section(name, 1, 0.0, alive, data)

    budget = FallbackBudget(HandClock())
    budget.share([section(owner, taken_over=[20, FREE]), section("router_unary", taken_over=[9, 99])], "router_unary")
    assert taken(budget, BUSY) != counts
    # One that is older tells nothing.
    budget.share([section(owner)], "router_unary")
    assert taken(budget, BUSY)
