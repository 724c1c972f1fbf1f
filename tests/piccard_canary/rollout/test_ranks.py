"""Stratified rank tests against counting every pair, and the mixture against its integral."""

from itertools import product
from math import comb, exp, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from piccard_canary.rollout.ranks import Score, Strata, bins_of, rank_score, ratio_estimate, tail_score
from piccard_canary.rollout.strata import BIN_RATIO, VALUE_BINS
from piccard_canary.rollout.table import Table

values = st.lists(st.integers(100, 112), min_size=2, max_size=30)


def table(*rows: list[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """One stratum a row of bins."""
    return np.array([np.bincount(row, minlength=VALUE_BINS) for row in rows])


@given(st.lists(st.tuples(values, values), min_size=1, max_size=3), st.integers(-3, 3))
def test_rank_score_counts_pairs(strata: list[tuple[list[int], list[int]]], bins: int) -> None:
    value = variance = 0.0
    for canary, stable in strata:
        moved = [v - bins for v in canary]
        wins = sum((c > s) + 0.5 * (c == s) for c, s in product(moved, stable))
        m, n, both = len(canary), len(stable), moved + stable
        # The variance of a sum of m midranks drawn of m + n without replacement.
        ranks = [sum(o < v for o in both) + 0.5 * (sum(o == v for o in both) + 1) for v in both]
        variance += m * n / (m + n) * np.var(ranks, ddof=1) / (m + n + 1) ** 2
        value += (wins - m * n / 2) / (m + n + 1)
    score = rank_score(Strata(table(*(c for c, _ in strata)), table(*(s for _, s in strata))), bins)

    assert score.value == pytest.approx(value, abs=1e-9)
    assert score.variance == pytest.approx(variance, abs=1e-9)


@given(values, values)
def test_tail_score_is_hypergeometric(canary: list[int], stable: list[int]) -> None:
    score = tail_score(Strata(table(canary), table(stable)), 0, quantile=0.75)
    both = np.sort(canary + stable)
    cut = both[int(0.75 * len(both))]
    above, m, total = int((both >= cut).sum()), len(canary), len(both)
    chances = [comb(above, k) * comb(total - above, m - k) / comb(total, m) for k in range(above + 1) if k <= m]
    mean = sum(k * p for k, p in enumerate(chances))

    assert score.value == pytest.approx(sum(v >= cut for v in canary) - mean, abs=1e-9)
    assert score.variance == pytest.approx(sum((k - mean) ** 2 * p for k, p in enumerate(chances)), abs=1e-9)


@pytest.mark.parametrize("score", [Score(0.0, 0.0), Score(3.0, 4.0), Score(-5.0, 9.0), Score(40.0, 100.0)])
def test_evidence_is_the_mixture(score: Score) -> None:
    effect = np.linspace(0, 12, 200_001)
    density = 2 * np.exp(-(effect**2) / 2) / sqrt(2 * np.pi)
    rows = density * np.exp(effect * score.value - effect**2 * score.variance / 2)
    integral = (rows.sum() - (rows[0] + rows[-1]) / 2) * effect[1]
    assert exp(score.log_evidence()) == pytest.approx(integral, rel=1e-6)


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.2])
def test_the_factor_is_found(factor: float) -> None:
    """Within a bin, over strata whose times differ by far more."""
    random = np.random.default_rng(3)
    rows = []
    for middle in (60, 110, 160):
        times = middle + random.normal(0, 5, (2, 4000))
        times[0] += np.log(factor) / np.log(BIN_RATIO)
        rows.append(times.round().astype(int))
    strata = Strata(table(*(row[0] for row in rows)), table(*(row[1] for row in rows)))
    assert ratio_estimate(lambda bins: rank_score(strata, bins)) == pytest.approx(factor, rel=0.05)


def counted(*rows: list[int]) -> Table:
    """One stratum a row of bins, request by request."""
    found = Table(len(rows))
    for stratum, bins in enumerate(rows):
        found.count(np.full(len(bins), stratum), np.array(bins))
    return found


def test_strata_without_enough_pairs_are_left_out() -> None:
    rare, many = [100] * 29, [*range(100, 129), 100]
    strata = Strata.shared(counted(rare, many, many), counted(many, rare, many))
    assert len(strata) == 1
    assert strata.pairs == 30
    assert (strata.canary == table(many)).all()
    nothing = Strata.shared(counted(rare), counted(rare))
    assert rank_score(nothing, bins_of(1.05)) == tail_score(nothing, 0) == Score()


def test_a_shift_loses_no_request() -> None:
    ends = table([0, 1, VALUE_BINS - 1])
    for bins in (-5, 5):
        assert rank_score(Strata(ends, ends), bins).variance > 0
