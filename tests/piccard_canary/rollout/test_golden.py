"""Comparisons of golden prompts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from piccard_canary.rollout.golden import LEAST_PROMPTS, GoldenComparison, GoldenScore


def scores(logprob: float = -10.0, tokens: int = 5, prompts: int = LEAST_PROMPTS) -> list[GoldenScore]:
    return [GoldenScore(logprob, ("piece",) * (tokens + 3), tokens)] * prompts


@pytest.mark.parametrize(
    ("canary", "stable", "sizes"),
    [
        (scores(prompts=7), scores(prompts=7), [20] * 7),
        (scores(), scores(prompts=9), [20] * 8),
        (scores(), scores(), [20] * 9),
        ([], [], []),
    ],
)
def test_prompts_without_a_pair_are_refused(
    canary: list[GoldenScore], stable: list[GoldenScore], sizes: list[int]
) -> None:
    with pytest.raises(ValueError, match="golden prompts come in pairs, 8 at least"):
        GoldenComparison(canary, stable, sizes)


def test_tokens_are_the_same_only_where_all_texts_are_cut_alike() -> None:
    assert GoldenComparison(scores(), scores(), [20] * 8).same_tokens
    other = [*scores()[1:], GoldenScore(-10.0, ("pie", "ce"), 5)]
    assert not GoldenComparison(scores(), other, [20] * 8).same_tokens
    assert not GoldenComparison(scores(tokens=4), scores(tokens=5), [20] * 8).same_tokens


@given(
    st.lists(st.tuples(st.floats(-500, -0.1), st.integers(1, 90)), min_size=8, max_size=20),
    st.integers(1, 4),
    st.floats(0.001, 1.0),
)
def test_a_drop_is_as_large_by_bytes_as_by_tokens(
    rows: list[tuple[float, int]], bytes_per_token: int, share: float
) -> None:
    """Where all tokens are as long, one unit is the other times a factor, and a bound turns with it."""
    stable = [GoldenScore(logprob, ("x",) * tokens, tokens) for logprob, tokens in rows]
    canary = [GoldenScore(logprob * (1 + share), ("x",) * tokens, tokens) for logprob, tokens in rows]
    cut_finer = [GoldenScore(one.logprob, ("y",) * 2 * one.tokens, 2 * one.tokens) for one in canary]
    sizes = [bytes_per_token * tokens for _, tokens in rows]
    by_token = GoldenComparison(canary, stable, sizes)
    by_byte = GoldenComparison(cut_finer, stable, sizes)
    assert (by_token.unit, by_byte.unit) == ("nats a token", "bits a byte")
    scaled = [drop * by_byte.bound_scale for drop in by_token.drops()]
    assert by_byte.drops() == pytest.approx(scaled)
