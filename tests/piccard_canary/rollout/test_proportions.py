"""Proportions: the evidence is a fair bet under equality, the bounds are those of the literature."""

from math import comb, exp

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from piccard_canary.rollout.proportions import Trial, excess_bound, log_evidence, wilson

Z95 = 1.959964


@pytest.mark.parametrize("events", [1, 4, 12])
@pytest.mark.parametrize(("canary", "stable"), [(50, 950), (250, 750), (500, 500)])
def test_evidence_has_mean_one_where_rates_are_equal(events: int, canary: int, stable: int) -> None:
    """Over the binomial exactly; over the hypergeometric, which is what happens, at most."""
    share = canary / (canary + stable)
    value = [exp(log_evidence([Trial(canary, s, stable, events - s)])) for s in range(events + 1)]
    binomial = [comb(events, s) * share**s * (1 - share) ** (events - s) for s in range(events + 1)]
    drawn = [comb(canary, s) * comb(stable, events - s) / comb(canary + stable, events) for s in range(events + 1)]

    assert np.dot(binomial, value) == pytest.approx(1.0, rel=1e-9)
    assert np.dot(drawn, value) <= 1.0 + 1e-9


def test_evidence_seldom_grows_however_often_one_looks() -> None:
    """Ville: of 500 equal canaries that are looked at after every event, at most 5 % ever reach 1/0.05."""
    random = np.random.default_rng(1)
    crossed = 0
    for _ in range(500):
        hits = np.cumsum(random.random(80) < 0.2)
        looks = (log_evidence([Trial(200, int(s), 800, n - int(s))]) for n, s in enumerate(hits, 1))
        crossed += any(value >= -np.log(0.05) for value in looks)
    assert crossed <= 25


@given(st.integers(0, 40), st.integers(0, 40))
def test_steps_count_together(first: int, second: int) -> None:
    """Two steps with the same shares are one longer step."""
    apart = log_evidence([Trial(100, first, 900, 3), Trial(100, second, 900, 5)])
    assert apart == pytest.approx(log_evidence([Trial(200, first + second, 1800, 8)]))


def test_more_errors_are_more_evidence() -> None:
    values = [log_evidence([Trial(600, errors, 11400, 11)]) for errors in range(13)]
    assert values[3:] == sorted(values[3:])
    assert values[0] < 0 < values[12]
    assert log_evidence([]) == 0.0


@pytest.mark.parametrize(
    ("events", "requests", "lower", "upper"),
    # Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_limits(events: int, requests: int, lower: float, upper: float) -> None:
    _, low, high = wilson(events, requests, Z95)
    assert (low, high) == pytest.approx((lower, upper), abs=5e-5)


@pytest.mark.parametrize(
    ("first", "second", "upper"),
    # Newcombe 1998, "Interval estimation for the difference between independent proportions", table II, method 10.
    [((56, 70), (48, 80), 0.3339), ((9, 10), (3, 10), 0.8090), ((6, 7), (2, 7), 0.8062)],
)
def test_bound_of_a_difference(first: tuple[int, int], second: tuple[int, int], upper: float) -> None:
    trial = Trial(first[1], first[0], second[1], second[0])
    assert excess_bound(trial, Z95) == pytest.approx(upper, abs=5e-5)


def test_nothing_seen_bounds_nothing() -> None:
    assert wilson(0, 0, Z95) == (0.0, 0.0, 1.0)
    assert excess_bound(Trial(0, 0, 1000, 1), Z95) >= 0.99
