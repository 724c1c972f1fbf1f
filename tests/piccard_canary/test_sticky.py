"""A caller's place in the traffic."""

from hypothesis import given
from hypothesis import strategies as st
from piccard_canary.sticky import position

keys = st.text(max_size=30)


@given(keys, keys)
def test_a_position_is_within_0_and_1(salt: str, key: str) -> None:
    assert 0 <= position(salt, key) < 1
    assert position(salt, key) == position(salt, key)


def test_positions_are_spread_evenly() -> None:
    counts = [0] * 10
    for number in range(10_000):
        counts[int(position("salt", f"user:{number}") * 10)] += 1

    # 1,000 expected in each; the standard deviation is 30.
    assert all(850 < count < 1150 for count in counts)


@given(st.lists(keys, max_size=50, unique=True), st.floats(0, 1), st.floats(0, 1))
def test_raising_the_ratio_moves_nobody_back(callers: list[str], one: float, other: float) -> None:
    low, high = sorted((one, other))
    on_canary = {key for key in callers if position("s", key) < low}

    assert on_canary <= {key for key in callers if position("s", key) < high}


def test_a_new_salt_deals_new_places() -> None:
    before = [position("one", str(number)) < 0.5 for number in range(1000)]
    after = [position("two", str(number)) < 0.5 for number in range(1000)]

    assert 400 < sum(a == b for a, b in zip(before, after, strict=True)) < 600


def test_salt_and_key_are_kept_apart() -> None:
    assert position("a", "bc") != position("ab", "c")
