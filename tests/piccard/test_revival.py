"""When a dead process is started again, and when no more."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from piccard.revival import GIVE_UP_AFTER, GOOD_LIFE, LONGEST_PAUSE, Revival, pause_after


def dies(revival: Revival, now: float) -> None:
    revival.alive(now)
    revival.dead(now)


def test_first_death_is_followed_by_a_start_at_once() -> None:
    revival = Revival()
    dies(revival, 10.0)
    assert revival.due(10.0)
    assert revival.seconds_left(10.0) == 0.0


def test_pauses_double_up_to_a_limit() -> None:
    assert [pause_after(tries) for tries in range(9)] == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert pause_after(10**9) == LONGEST_PAUSE


def test_a_start_is_not_repeated_before_its_pause_is_over() -> None:
    revival = Revival()
    dies(revival, 0.0)
    revival.begin()
    revival.failed(5.0, "no memory")
    assert not revival.due(5.9)
    assert revival.seconds_left(5.5) == 0.5
    assert revival.due(6.0)


def test_one_that_cannot_be_started_is_given_up_with_the_reason() -> None:
    revival = Revival(limit=2)
    dies(revival, 0.0)
    for _ in range(2):
        revival.begin()
        revival.failed(100.0, "no memory")
    assert revival.given_up == "it could not be started 2 times in a row: no memory"
    assert not revival.due(1e9)
    assert revival.seconds_left(1e9) is None


def test_a_try_that_is_put_off_does_not_count() -> None:
    revival = Revival(limit=1)
    dies(revival, 0.0)
    for now in range(5):
        assert revival.due(now)
        revival.begin()
        revival.put_off(now)
        assert (revival.tries, revival.given_up, revival.due(now)) == (0, "", False)


def test_one_that_always_dies_is_given_up() -> None:
    revival = Revival(limit=2)
    now = 0.0
    dies(revival, now)
    for _ in range(2):
        revival.begin()
        revival.started(now)
        now += 10
        revival.dead(now)
    assert "died again within 300 s of each of 2 starts" in revival.given_up


def test_a_death_is_counted_once_however_often_it_is_seen() -> None:
    revival = Revival(limit=1)
    dies(revival, 0.0)
    revival.begin()
    revival.failed(0.0, "x")
    revival.dead(1.0)
    assert revival.tries == 1


def test_a_long_life_forgets_what_went_before() -> None:
    revival = Revival(limit=2)
    dies(revival, 0.0)
    revival.begin()
    revival.started(0.0)
    revival.dead(GOOD_LIFE)
    assert (revival.tries, revival.given_up) == (0, "")
    assert revival.due(GOOD_LIFE)


def test_whoever_lives_again_is_not_given_up() -> None:
    revival = Revival(limit=1)
    dies(revival, 0.0)
    revival.begin()
    revival.failed(0.0, "x")
    assert revival.given_up
    revival.alive(1.0)
    assert (revival.tries, revival.given_up) == (0, "")


@given(
    st.lists(
        st.tuples(st.sampled_from(["dies", "fails"]), st.floats(0.0, 2 * GOOD_LIFE, allow_nan=False)), max_size=60
    ),
    st.integers(1, GIVE_UP_AFTER),
)
def test_whatever_happens_the_starts_are_bounded(events: list[tuple[str, float]], limit: int) -> None:
    """Between two long lives there are at most `limit` starts, each after its pause, and the last gives up."""
    revival = Revival(limit)
    now, in_a_row = 0.0, 0
    dies(revival, now)
    for kind, lived in events:
        if revival.given_up:
            assert in_a_row == limit
            assert not revival.due(now + 1e6)
            return
        left = revival.seconds_left(now)
        assert left == pytest.approx(pause_after(in_a_row))
        now += left
        assert revival.due(now)
        revival.begin()
        in_a_row += 1
        if kind == "fails":
            revival.failed(now, "reason")
        else:
            revival.started(now)
            now += lived
            revival.dead(now)
            if lived >= GOOD_LIFE:
                in_a_row = 0
        assert in_a_row <= limit
        assert bool(revival.given_up) == (in_a_row == limit)
