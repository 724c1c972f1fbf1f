"""Each sampling function against a plain float64 reference, and the draw against exact probabilities."""

import math

import numpy as np
import pytest
import torch
from deepseek_engine import sampling
from deepseek_engine.random_numbers import uniforms
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_reference import filtered, softmax

SEEDS = st.integers(0, 2**31)
NO_DEADLINE = settings(deadline=None, max_examples=60)


def random_logits(seed, rows, vocabulary, scale=3.0):
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def column(values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype).unsqueeze(-1)


def kept(filtered):
    return [set(torch.nonzero(row > -math.inf).flatten().tolist()) for row in filtered]


def probabilities(row):
    return softmax(np.asarray(row, dtype=np.float64))


@NO_DEADLINE
@given(SEEDS, st.lists(st.integers(-1, 12), min_size=1, max_size=4))
def test_top_k_keeps_the_k_largest(seed, top_k):
    logits = random_logits(seed, len(top_k), 10)
    for row, k, left in zip(logits, top_k, kept(sampling.apply_top_k(logits, column(top_k, torch.int64))), strict=True):
        size = 10 if k <= 0 else min(k, 10)
        assert left == set(np.argsort(-row.numpy())[:size].tolist())


@NO_DEADLINE
@given(
    SEEDS, st.lists(st.floats(0.01, 1.0), min_size=1, max_size=4), st.sampled_from([7, 300, 3000]), st.floats(0.1, 5)
)
def test_top_p_keeps_the_smallest_set_that_reaches_p(seed, top_p, vocabulary, scale):
    logits = random_logits(seed, len(top_p), vocabulary, scale)
    for row, p, left in zip(logits, top_p, kept(sampling.apply_top_p(logits, column(top_p))), strict=True):
        if p == 1.0:
            assert len(left) == vocabulary
            continue
        order = np.argsort(-row.numpy())
        mass = np.cumsum(probabilities(row)[order])
        size = len(left)
        assert left == set(order[:size].tolist())
        # Float32 may put the edge one token off where the mass meets p to within its rounding.
        assert mass[size - 1] >= p - 1e-5
        assert size == 1 or mass[size - 2] < p + 1e-5


@NO_DEADLINE
@given(SEEDS, st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4))
def test_min_p_keeps_what_is_likely_enough_beside_the_best(seed, min_p):
    logits = random_logits(seed, len(min_p), 40)
    for row, p, left in zip(logits, min_p, kept(sampling.apply_min_p(logits, column(min_p))), strict=True):
        exact = probabilities(row)
        ratio = exact / exact.max()
        assert {i for i in range(40) if ratio[i] > p + 1e-5} <= left
        assert left <= {i for i in range(40) if ratio[i] > p - 1e-5}
        assert int(row.argmax()) in left


def test_rows_are_filtered_one_by_one():
    logits = random_logits(5, 4, 3000, 0.5)
    top_p = [0.1, 1.0, 0.99, 0.5]
    together = sampling.apply_top_p(logits, column(top_p))
    alone = [sampling.apply_top_p(logits[i : i + 1], column(top_p[i : i + 1])) for i in range(4)]
    assert torch.equal(together, torch.cat(alone))


@NO_DEADLINE
@given(
    SEEDS,
    st.floats(0.2, 3.0),
    st.floats(-2.0, 2.0),
    st.floats(-2.0, 2.0),
    st.lists(st.integers(0, 19), max_size=15),
    st.lists(st.integers(0, 19), max_size=15),
)
def test_penalties_are_those_of_their_definition(seed, repetition, frequency, presence, prompt, output):
    logits = random_logits(seed, 1, 20)
    counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=20).to(torch.int32).unsqueeze(0)
    seen = torch.zeros(1, 20, dtype=torch.bool)
    seen[0, prompt] = True
    result = sampling.apply_penalties(
        logits, counts, seen, column([repetition]), column([frequency]), column([presence])
    )
    for token in range(20):
        value = float(logits[0, token])
        if token in prompt or token in output:
            value = value / repetition if value > 0 else value * repetition
        value -= frequency * output.count(token) + presence * (token in output)
        assert float(result[0, token]) == pytest.approx(value, abs=1e-4)


@NO_DEADLINE
@given(SEEDS, st.integers(0, 20), st.integers(1, 4))
def test_logprobs_are_those_of_float64(seed, count, rows):
    logits = random_logits(seed, rows, 20)
    chosen = torch.randint(20, (rows,), generator=torch.Generator().manual_seed(seed))
    told = sampling.gather_logprobs(logits, chosen, count)
    for row in range(rows):
        exact = np.log(probabilities(logits[row]))
        order = np.argsort(-exact)
        assert told.token_ids[row].tolist() == [int(chosen[row]), *order[:count].tolist()]
        assert told.logprobs[row].numpy() == pytest.approx(exact[told.token_ids[row].numpy()], abs=1e-5)
        assert int(told.ranks[row]) == 1 + order.tolist().index(int(chosen[row]))


@NO_DEADLINE
@given(SEEDS, st.lists(st.floats(0.0, 1.0, exclude_max=True), min_size=1, max_size=6), st.sampled_from([1, 5, 1000]))
def test_a_draw_inverts_the_cumulated_distribution(seed, numbers, vocabulary):
    logits = random_logits(seed, len(numbers), vocabulary)
    drawn = sampling.draw(logits, torch.tensor(numbers, dtype=torch.float64))
    for row, number, token in zip(logits, numbers, drawn.tolist(), strict=True):
        cumulated = np.concatenate(([0.0], np.cumsum(probabilities(row))))
        assert cumulated[token] - 1e-6 <= number <= cumulated[token + 1] + 1e-6


@given(st.lists(st.booleans(), min_size=1, max_size=30).filter(any), st.sampled_from([0.0, 0.5, 1 - 2.0**-53]))
def test_a_masked_token_is_never_drawn(allowed, number):
    logits = torch.tensor([[0.0 if one else -math.inf for one in allowed]])
    assert allowed[int(sampling.draw(logits, torch.tensor([number], dtype=torch.float64)))]


def chi_square(tokens, expected):
    """Statistic and degrees of freedom; tokens of probability 0 must not occur."""
    counts = np.bincount(tokens, minlength=len(expected))
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    wanted = expected[possible] * len(tokens)
    return ((counts[possible] - wanted) ** 2 / wanted).sum(), np.count_nonzero(possible) - 1


@pytest.mark.parametrize(
    ("name", "temperature", "filters", "size"),
    [
        ("plain", 1.0, {}, 12),
        ("hot", 2.0, {}, 12),
        ("cold", 0.5, {}, 12),
        ("top_k", 1.0, {"top_k": 5}, 5),
        ("top_p", 1.0, {"top_p": 0.9}, None),
        ("min_p", 1.0, {"min_p": 0.1}, None),
        ("top_k and top_p", 1.0, {"top_k": 8, "top_p": 0.8}, None),
    ],
)
def test_draws_follow_the_exact_distribution(name, temperature, filters, size):
    row = torch.tensor([2.0, 1.7, 1.4, 1.0, 0.9, 0.7, 0.4, 0.1, -0.2, -0.4, -0.8, -1.0])
    row = row[torch.randperm(12, generator=torch.Generator().manual_seed(1))]
    expected = softmax(filtered(row.numpy().astype(np.float64) / temperature, **filters))
    assert size is None or np.count_nonzero(expected) == size
    draws = 20_000
    logits = (row / temperature).expand(draws, -1)
    if "min_p" in filters:
        logits = sampling.apply_min_p(logits, column([filters["min_p"]]))
    if "top_k" in filters:
        logits = sampling.apply_top_k(logits, column([filters["top_k"]] * draws, torch.int64))
    if "top_p" in filters:
        logits = sampling.apply_top_p(logits, column([filters["top_p"]]))
    tokens = sampling.draw(logits, torch.from_numpy(uniforms(1234, 0, 0, draws))).numpy()
    statistic, freedom = chi_square(tokens, expected)
    # Wilson and Hilferty's approximation of the 0.9999 quantile.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit, name


def test_rows_of_nan_do_not_disturb_their_neighbours():
    logits = random_logits(3, 3, 300)
    broken = logits.clone()
    broken[1] = math.nan
    numbers = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)

    def sample(rows):
        rows = sampling.apply_min_p(rows, column([0.01] * 3))
        rows = sampling.apply_top_k(rows, column([50] * 3, torch.int64))
        return sampling.draw(sampling.apply_top_p(rows, column([0.9] * 3)), numbers).tolist()

    sound, disturbed = sample(logits), sample(broken)
    assert (sound[0], sound[2]) == (disturbed[0], disturbed[2])
