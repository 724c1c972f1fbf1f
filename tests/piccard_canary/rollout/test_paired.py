"""The paired t-test against the integral of its density, and against tables."""

from math import exp, lgamma, log, pi

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from piccard_canary.rollout.paired import chance_above, quantile, upper_bound, upper_tail

differences = st.lists(st.floats(-1, 1), min_size=2, max_size=40)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 10, 15, 30, 255])
@pytest.mark.parametrize("t", [-1.3, 0.0, 0.4, 2.0, 6.0])
def test_tail_is_the_integral_of_the_density(t: float, degrees: int) -> None:
    # t = sqrt(n) tan(a) makes the integral finite: its density is proportional to cos(a)^(n - 1).
    angles = np.linspace(np.arctan(t / degrees**0.5), pi / 2, 200_001)
    rows = np.cos(angles) ** (degrees - 1)
    integral = (rows.sum() - (rows[0] + rows[-1]) / 2) * (angles[1] - angles[0])
    constant = exp(lgamma((degrees + 1) / 2) - lgamma(degrees / 2) - 0.5 * log(pi))
    assert upper_tail(t, degrees) == pytest.approx(constant * integral, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(
    ("chance", "degrees", "t"),
    [(0.05, 1, 6.314), (0.025, 2, 4.303), (0.05, 15, 1.753), (0.0005, 11, 4.437), (0.0005, 120, 3.373)],
)
def test_quantiles_are_those_of_the_tables(chance: float, degrees: int, t: float) -> None:
    assert quantile(chance, degrees) == pytest.approx(t, abs=6e-4)


def test_chance_above_is_that_of_a_textbook_sample() -> None:
    """Student's own example (1908): the additional sleep of ten patients."""
    hours = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]
    assert chance_above(hours, 0.0) == pytest.approx(0.00142, abs=5e-6)


@given(differences, st.floats(-1, 1))
def test_a_higher_bound_is_harder_to_exceed(values: list[float], bound: float) -> None:
    assert chance_above(values, bound) >= chance_above(values, bound - 0.1)
    assert 0.0 < chance_above(values, bound) <= 1.0


@given(differences)
def test_the_bound_is_where_the_test_turns(values: list[float]) -> None:
    """At the upper bound a lower mean would be told with the chance of the quantile, 5 % for 1.645."""
    bound = upper_bound(values, 1.645)
    assert bound >= np.mean(values) - 1e-12
    if np.std(values) > 1e-6:
        assert chance_above([-value for value in values], -bound) == pytest.approx(0.05, rel=1e-3)


def test_equal_differences_leave_no_doubt() -> None:
    assert chance_above([0.1] * 8, 0.05) < 1e-13
    assert chance_above([0.1] * 8, 0.1) == 1.0
    assert upper_bound([0.1] * 8, 1.645) == pytest.approx(0.1)


def test_false_alarms_are_as_rare_as_promised() -> None:
    random = np.random.default_rng(0)
    chances = [chance_above(list(row), 0.0) for row in random.standard_normal((4000, 12))]
    assert np.mean(np.array(chances) <= 0.01) == pytest.approx(0.01, abs=0.004)
