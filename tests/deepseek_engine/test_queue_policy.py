"""Who goes first, who is refused, and who has waited too long."""

import pytest
from deepseek_engine.queue_policy import (
    MOST_EXPECTED,
    PRIORITY_SECONDS,
    TOKENS_PER_SECOND,
    QueuePolicy,
    queue_rank,
    service_weight,
)
from hypothesis import given
from hypothesis import strategies as st
from piccard_contract.errors import ErrorCode, RequestError

seconds = st.floats(0, 1e6, allow_nan=False)
tokens = st.integers(1, 10**6)
priorities = st.integers(-100, 100)


@given(arrived=seconds, expected=tokens, priority=priorities, others=st.tuples(priorities, tokens))
def test_nobody_starves(arrived: float, expected: int, priority: int, others: tuple[int, int]) -> None:
    """Whoever has waited as long as priority and size can count is before all that come from then on."""
    most = PRIORITY_SECONDS * 200 + MOST_EXPECTED / TOKENS_PER_SECOND
    assert queue_rank(arrived, priority, expected) <= queue_rank(arrived + most + 1e-3, *others)


@given(arrived=seconds, priority=priorities, small=tokens, large=tokens)
def test_of_two_that_come_together_the_smaller_goes_first(
    arrived: float, priority: int, small: int, large: int
) -> None:
    small, large = sorted((small, large))
    assert queue_rank(arrived, priority, small) <= queue_rank(arrived, priority, large)
    assert queue_rank(arrived, priority, large) <= queue_rank(arrived, priority + 5, small)


@given(arrived=seconds, priority=priorities, expected=tokens, others=tokens)
def test_a_better_priority_goes_first_of_two_that_come_together(
    arrived: float, priority: int, expected: int, others: int
) -> None:
    """Of one size always, and of any size by five steps."""
    assert queue_rank(arrived, priority, expected) < queue_rank(arrived, priority + 1, expected)
    assert queue_rank(arrived, priority, expected) < queue_rank(arrived, priority + 5, others)


def test_expected_tokens_count_by_the_service_s_weight() -> None:
    """A step of priority is worth its seconds, and half of what each token counts, by a quarter at least."""
    assert queue_rank(10.0, 2, 100) == pytest.approx(10.0 + 2 * PRIORITY_SECONDS + 4 * 100 / TOKENS_PER_SECOND)
    assert [service_weight(priority) for priority in (-100, -2, -1, 0, 1, 2, 100)] == [0.25, 0.25, 0.5, 1, 2, 4, 4]
    assert queue_rank(0.0, 2, 10**6) == queue_rank(0.0, 2, MOST_EXPECTED)


@given(most=st.integers(1, 100), waiting=st.integers(0, 120), coming=st.integers(1, 8))
def test_the_queue_has_an_end(most: int, waiting: int, coming: int) -> None:
    policy = QueuePolicy(most, 5.0)
    if waiting + coming <= most:
        policy.check(waiting, coming)
        return
    with pytest.raises(RequestError, match=f"of {most} that may") as raised:
        policy.check(waiting, coming)
    assert raised.value.code is ErrorCode.OVERLOADED
    assert raised.value.retry_after == 1.0


@given(waits=st.lists(st.floats(0, 10_000, allow_nan=False), max_size=50))
def test_a_retry_is_promised_for_about_what_others_waited(waits: list[float]) -> None:
    policy = QueuePolicy(1, 5.0)
    for waited in waits:
        policy.began(waited)
    assert 1.0 <= policy.retry_after <= max(1.0, min(60.0, max(waits, default=0.0) + 0.1))


def test_who_waits_too_long_is_told_so() -> None:
    policy = QueuePolicy(10, 5.0)
    assert [policy.is_overdue(waited) for waited in (0.0, 5.0, 5.1)] == [False, False, True]
    error = policy.overdue()
    assert (error.code, error.retry_after) == (ErrorCode.OVERLOADED, 1.0)
    assert "waited 5 s for its first step" in error.message
