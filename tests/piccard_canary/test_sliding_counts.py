"""Counts of a window: against a list of everything that was counted."""

from hypothesis import given
from hypothesis import strategies as st
from piccard_canary.sliding_counts import SLOTS, Counts, SlidingCounts

WINDOW = 10.0

steps = st.lists(st.tuples(st.floats(0, 30), st.integers(0, 3), st.integers(0, 3)), max_size=40)


@given(steps)
def test_a_tenth_of_the_window_is_all_that_it_is_off(rows: list[tuple[float, int, int]]) -> None:
    counts, now, seen = SlidingCounts(), 50.0, []
    for step, requests, events in rows:
        now += step
        counts.add(now, WINDOW, Counts(requests, events))
        seen.append((now, requests, events))
        told = counts.totals(now, WINDOW)
        # What is less than nine tenths of the window old counts, what is older than all of it does not.
        surely = [row for row in seen if row[0] > now - WINDOW * (1 - 1 / SLOTS) + 1e-6]
        perhaps = [row for row in seen if row[0] >= now - WINDOW - 1e-6]
        assert sum(row[1] for row in surely) <= told.requests <= sum(row[1] for row in perhaps)
        assert sum(row[2] for row in surely) <= told.events <= sum(row[2] for row in perhaps)


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(1, 3600)), max_size=40))
def test_jumps_of_the_clock_never_count_twice_or_for_ever(moves: list[tuple[float, float]]) -> None:
    counts, now = SlidingCounts(), 1e7
    for number, (step, window) in enumerate(moves, start=1):
        now += step
        counts.add(now, window, Counts(1, 1))
        told = counts.totals(now, window)
        assert 1 <= told.requests == told.events <= number
        assert counts.totals(now + window * (1 + 1 / SLOTS), window) == Counts()


def test_threads_that_come_in_another_order_than_they_read_the_clock_lose_nothing() -> None:
    counts = SlidingCounts()
    counts.add(20.0, WINDOW, Counts(1, 0))
    counts.add(19.999, WINDOW, Counts(1, 1))
    assert counts.totals(20.0, WINDOW) == Counts(2, 1)
    # By more than a slot it went back, and what was counted is news of the future.
    counts.add(15.0, WINDOW, Counts(1, 0))
    assert counts.totals(15.0, WINDOW) == Counts(1, 0)
