"""A bucket of tokens over any course of time, load and demand."""

from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from piccard_canary.token_bucket import HIGH_LOAD, TokenBucket, capacity_at, refill_at

RATE, BURST = 100.0, 1000.0
loads = st.floats(0, 1)


@dataclass(frozen=True)
class Moment:
    """Seconds since the last one, the load that is seen now, and what is asked for."""

    seconds: float
    load: float
    cost: float


moments = st.lists(
    st.builds(Moment, st.floats(-1e4, 1e4) | st.floats(0, 10), loads, st.floats(0, 2 * BURST) | st.just(0.0)),
    min_size=1,
    max_size=40,
)


@pytest.mark.parametrize(("load", "capacity", "refill"), [(0.0, 1500, 120), (0.5, 1250, 120), (1.0, 1000, 80)])
def test_size_and_inflow_at_a_load(load: float, capacity: float, refill: float) -> None:
    assert capacity_at(BURST, load) == capacity
    assert refill_at(RATE, load) == pytest.approx(refill)


def test_the_inflow_changes_above_the_high_load() -> None:
    assert refill_at(RATE, HIGH_LOAD) == pytest.approx(120)
    assert refill_at(RATE, HIGH_LOAD + 1e-6) == pytest.approx(80)


@given(moments, st.integers(0, 39), loads)
@example([Moment(0, 1, 0), Moment(0, 0, 1500)], 1, 1.0)
def test_no_window_admits_more_than_the_bucket_held_and_gained(course: list[Moment], window: int, load: float) -> None:
    """From any moment on: what was taken is at most the capacity of that moment and the inflow since."""
    now = 0.0
    bucket = TokenBucket(RATE, BURST, now=now, load=load)
    allowed, taken = None, 0.0
    for index, moment in enumerate(course):
        now += moment.seconds
        gained = max(0.0, moment.seconds) * refill_at(RATE, load)
        load = moment.load
        bucket.follow(now, load)
        if allowed is not None:
            allowed += gained
        elif index == min(window, len(course) - 1):
            allowed = capacity_at(BURST, load)
        if bucket.wait(moment.cost) == 0.0:
            bucket.take(moment.cost)
            taken += moment.cost if allowed is not None else 0.0
        assert allowed is None or taken <= allowed + 1e-6 * BURST
        assert -1e-6 * BURST <= bucket.level <= bucket.capacity <= bucket.most


@given(moments, st.floats(0, BURST))
def test_what_fits_comes_after_the_wait_that_was_told(course: list[Moment], cost: float) -> None:
    now = 0.0
    bucket = TokenBucket(RATE, BURST, now=now, load=0.0)
    for moment in course:
        now += moment.seconds
        bucket.follow(now, moment.load)
        if bucket.wait(moment.cost) == 0.0:
            bucket.take(moment.cost)
    wait = bucket.wait(cost)
    bucket.follow(now + wait, course[-1].load)
    # The clock itself is rounded, by as much as it is large.
    assert bucket.wait(cost) <= 1e-9 * abs(now) + 1e-9


@given(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9), loads)
def test_a_clock_that_jumps_neither_overfills_nor_empties_nor_stops_it(
    first: float, second: float, load: float
) -> None:
    bucket = TokenBucket(RATE, BURST, now=0.0, load=load)
    bucket.take(BURST)
    for now in (first, second):
        before = bucket.level
        bucket.follow(now, load)
        assert before <= bucket.level <= bucket.capacity
    bucket.take(bucket.level)
    bucket.follow(second + 1.0, load)
    assert bucket.level == pytest.approx(refill_at(RATE, load), rel=1e-5)


@given(st.lists(st.tuples(st.floats(0, BURST), st.floats(0, 2)), max_size=30), loads)
def test_what_is_settled_is_as_if_it_had_been_known(requests: list[tuple[float, float]], load: float) -> None:
    """Without time between, the level tells what requests really came to; more than expected is owed."""
    bucket = TokenBucket(RATE, BURST, now=0.0, load=load)
    used = 0.0
    for cost, share in requests:
        if bucket.wait(cost) == 0.0:
            bucket.take(cost)
            bucket.give_back(cost - cost * share)
            used += cost * share
    assert bucket.level == pytest.approx(bucket.capacity - used, abs=1e-6 * BURST)
    bucket.give_back(10 * BURST + used)
    assert bucket.level == bucket.capacity


@given(loads, loads)
def test_a_load_that_rises_takes_room_and_one_that_falls_gives_no_tokens(before: float, after: float) -> None:
    bucket = TokenBucket(RATE, BURST, now=0.0, load=before)
    bucket.follow(0.0, after)
    assert bucket.capacity == capacity_at(BURST, after)
    assert bucket.level == min(capacity_at(BURST, before), capacity_at(BURST, after))


def test_another_size_keeps_what_is_in_it() -> None:
    bucket = TokenBucket(RATE, BURST, now=0.0, load=1.0)
    bucket.take(400)
    bucket.resize(RATE, 500)
    assert bucket.level == 500
    bucket.resize(RATE, 5000)
    assert bucket.level == 500
    assert bucket.most == 7500
