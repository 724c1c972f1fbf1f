"""Student's one-sided paired test: is the mean of differences higher than a bound, is it lower."""

from collections.abc import Sequence
from functools import lru_cache
from math import atan2, cos, erfc, pi, sin, sqrt

import numpy as np

# Below it a probability cannot be told from 0 in the sum that it comes from.
_LEAST = 1e-14


def chance_above(differences: Sequence[float], bound: float) -> float:
    """Probability of a mean as high as that of `differences`, at most, where their true mean is `bound` or less.

    One-sided paired t-test (Student 1908, "The probable error of a mean", Biometrika 6); at least 1e-14.

    Args:
        differences: one a pair, at least two.
    """
    mean, error = _mean(differences)
    excess = mean - bound
    if error == 0.0:
        return _LEAST if excess > 0 else 1.0
    return upper_tail(excess / error, len(differences) - 1)


def upper_bound(differences: Sequence[float], z: float) -> float:
    """Upper confidence bound of the mean of `differences`, one-sided at the normal quantile `z`."""
    mean, error = _mean(differences)
    return mean + quantile(0.5 * erfc(z / sqrt(2.0)), len(differences) - 1) * error


def _mean(differences: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error."""
    values = np.asarray(differences)
    return float(values.mean()), float(values.std(ddof=1)) / sqrt(len(values))


def upper_tail(t: float, degrees: int) -> float:
    """P(T > t) of Student's t with whole `degrees` of freedom, at least 1e-14.

    The finite sums for P(|T| < t) of Abramowitz and Stegun 1964, 26.7.3 and 26.7.4.
    """
    if t < 0:
        return 1.0 - upper_tail(-t, degrees)
    angle = atan2(t, sqrt(degrees))
    square = cos(angle) ** 2
    odd = degrees % 2
    term = total = cos(angle) if odd else 1.0
    for factor in range(2 + odd, degrees - 1, 2):
        term *= square * (factor - 1) / factor
        total += term
    within = sin(angle) * total
    if odd:
        within = 2.0 / pi * (angle + (within if degrees > 1 else 0.0))
    return max(_LEAST, 0.5 * (1.0 - within))


@lru_cache(maxsize=64)
def quantile(chance: float, degrees: int) -> float:
    """The t that is exceeded with probability `chance`, 0 to 1/2."""
    low, high = 0.0, 1.0
    while upper_tail(high, degrees) > chance and high < 1e9:
        high *= 2.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        if upper_tail(middle, degrees) > chance:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)
