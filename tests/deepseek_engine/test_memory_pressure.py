"""Levels of a cache that fills up."""

import pytest
from deepseek_engine.memory_pressure import MemoryPressure
from hypothesis import given
from hypothesis import strategies as st
from piccard_contract.errors import ErrorCode, RequestError


@pytest.mark.parametrize(
    ("share", "level"),
    [(0.0, 0), (0.799, 0), (0.80, 1), (0.899, 1), (0.90, 2), (0.949, 2), (0.95, 3), (1.0, 3)],
)
def test_a_level_begins_at_its_share(share: float, level: int) -> None:
    pressure = MemoryPressure(1600)
    pressure.observe(share)
    assert pressure.level == level


def test_a_level_ends_below_its_share() -> None:
    pressure = MemoryPressure(1600)
    told = []
    for share in (0.96, 0.93, 0.90, 0.899, 0.86, 0.849, 0.76, 0.749):
        pressure.observe(share)
        told.append(int(pressure.level))
    assert told == [3, 3, 3, 2, 2, 1, 1, 0]


@given(st.lists(st.floats(0, 1), min_size=2))
def test_small_changes_of_the_share_do_not_flap(shares: list[float]) -> None:
    """Where the share moves by less than the gap of a level, the level does not go down and up again."""
    pressure = MemoryPressure(1600)
    base, *rest = shares
    pressure.observe(base)
    levels = []
    for share in rest:
        pressure.observe(base + (share - 0.5) * 0.049)
        levels.append(pressure.level)
    assert levels == sorted(levels)


@pytest.mark.parametrize(
    ("share", "num_prompt", "told"),
    [
        (0.89, 1000, None),
        (0.90, 100, None),
        (0.90, 101, "takes prompts of at most 100 tokens for now, not of 101"),
        (0.95, 1, "cache is full"),
    ],
)
def test_what_a_level_does_not_take(share: float, num_prompt: int, told: str | None) -> None:
    pressure = MemoryPressure(1600)
    pressure.observe(share)
    if told is None:
        pressure.check(num_prompt, 7.0)
        return
    with pytest.raises(RequestError, match=told) as raised:
        pressure.check(num_prompt, 7.0)
    assert (raised.value.code, raised.value.retry_after) == (ErrorCode.OVERLOADED, 7.0)
