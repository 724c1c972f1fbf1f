"""Stratified rank tests on latencies that are counted in bins: is the canary slower by more than a factor.

A factor is a shift by whole bins, so that one table serves every factor.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import erf, log, sqrt

import numpy as np

from piccard_canary.rollout.strata import BIN_RATIO, VALUE_BINS
from piccard_canary.rollout.table import Cells, Table

# Requests that each version must have in a stratum; one with fewer decides nothing.
MIN_PAIRS = 30

# Estimates of the ratio go no further than this many bins to either side, a factor of about 7.
_FARTHEST = 40
_NEAR = 4


@dataclass(frozen=True, slots=True)
class Score:
    """A sum over strata whose mean is 0 at most while the canary is not slower, and the sum of its variances."""

    value: float = 0.0
    variance: float = 0.0

    def __add__(self, other: "Score") -> "Score":
        return Score(self.value + other.value, self.variance + other.variance)

    @property
    def z(self) -> float:
        return self.value / sqrt(self.variance) if self.variance > 0 else 0.0

    def log_evidence(self) -> float:
        """Natural logarithm of the one-sided normal mixture over the effect, half normal with deviation 1.

        A score's sum has independent increments in the limit (Jennison and Turnbull 2000, "Group sequential methods",
        chapter 11), so exp(h value - h^2 variance / 2) is a supermartingale for each h > 0 while the canary is not
        slower, and so is its mean over h: it ever exceeds 1/a with probability a at most (Robbins 1970; Howard, Ramdas,
        McAuliffe and Sekhon 2021, "Time-uniform, nonparametric, nonasymptotic confidence sequences", Annals of
        Statistics 49).
        """
        precision = self.variance + 1.0
        tail = 0.5 * (1.0 + erf(self.value / sqrt(2.0 * precision)))
        return log(2.0) - 0.5 * log(precision) + self.value**2 / (2.0 * precision) + log(max(tail, 1e-300))


@dataclass(frozen=True, slots=True)
class Strata:
    """The strata in which both versions have MIN_PAIRS requests: int64 [strata, bins] of each."""

    canary: Cells
    stable: Cells

    @classmethod
    def shared(cls, canary: Table, stable: Table) -> "Strata":
        """Those of all strata that can be compared."""
        rows = np.flatnonzero((canary.requests >= MIN_PAIRS) & (stable.requests >= MIN_PAIRS))
        return cls(canary.cells[rows], stable.cells[rows])

    def __len__(self) -> int:
        return len(self.canary)

    @property
    def pairs(self) -> int:
        """Requests of the version that has fewer, over all strata."""
        return int(np.minimum(self.canary.sum(axis=1), self.stable.sum(axis=1)).sum())


def rank_score(strata: Strata, bins: int) -> Score:
    """The stratified rank sum for: canary is slower than BIN_RATIO**bins x stable.

    Mann and Whitney's count in each stratum, weighted by 1 / (requests + 1) and corrected for ties (van Elteren 1960,
    "On the combination of independent two sample tests of Wilcoxon", Bulletin of the ISI 37). Value / variance then is
    12 (P(canary > stable) - 1/2), whatever the numbers.
    """
    canary, stable = _occupied(_shifted(strata.canary, bins), strata.stable)
    m, n = canary.sum(axis=1), stable.sum(axis=1)
    both = (m + n).astype(np.float64)
    below = np.cumsum(stable, axis=1) - stable
    greater = (canary * (below + 0.5 * stable)).sum(axis=1)
    ties = (canary + stable).astype(np.float64)
    correction = (ties * ties * ties - ties).sum(axis=1) / (both * (both - 1.0))
    variance = m * n / 12.0 * (both + 1.0 - correction)
    weight = 1.0 / (both + 1.0)
    return Score(float((weight * (greater - 0.5 * m * n)).sum()), float((weight**2 * variance).sum()))


def tail_score(strata: Strata, bins: int, quantile: float = 0.99) -> Score:
    """The score for: more of the canary's requests are at or above a quantile of both, at BIN_RATIO**bins x stable.

    Mood's test at another quantile than the median, in each stratum, and their sum (Mantel and Haenszel 1959): given
    the requests up there, those of the canary are hypergeometric.
    """
    canary, stable = _shifted(strata.canary, bins), strata.stable
    pooled = canary + stable
    total = pooled.sum(axis=1, keepdims=True)
    # With the bin of the quantile itself: what all waited for the same timeout is in one bin.
    above = np.cumsum(pooled, axis=1) > quantile * total
    m, n = canary.sum(axis=1), stable.sum(axis=1)
    both = (m + n).astype(np.float64)
    count = (pooled * above).sum(axis=1)
    expected = count * m / both
    variance = expected * (n / both) * (both - count) / np.maximum(both - 1.0, 1.0)
    return Score(float(((canary * above).sum(axis=1) - expected).sum()), float(variance.sum()))


def ratio_estimate(score: Callable[[int], Score]) -> float:
    """The factor by which the canary is slower: the shift at which a score changes sign (Hodges and Lehmann 1963)."""
    # Most are near 1, where a narrow search finds them.
    near = score(-_NEAR).value > 0 >= score(_NEAR).value
    low, high = (-_NEAR, _NEAR) if near else (-_FARTHEST, _FARTHEST)
    while high - low > 1:
        middle = (low + high) // 2
        if score(middle).value > 0:
            low = middle
        else:
            high = middle
    return float(BIN_RATIO ** (0.5 * (low + high)))


def quantile_bin(table: Cells, quantile: float) -> int:
    """The bin in which the quantile of all requests of a table lies."""
    counts = np.cumsum(table.sum(axis=0))
    return int(np.searchsorted(counts, quantile * counts[-1]))


def bins_of(factor: float) -> int:
    """Whole bins next to a factor, such as 1.05."""
    return round(log(factor) / log(BIN_RATIO))


def _occupied(canary: Cells, stable: Cells) -> tuple[Cells, Cells]:
    """Both without the bins that are empty in all strata of both; the order of what is left is the same."""
    used = canary.any(axis=0) | stable.any(axis=0)
    return canary[:, used], stable[:, used]


def _shifted(table: Cells, bins: int) -> Cells:
    """Every value divided by BIN_RATIO**bins; what would leave the table stays at its end."""
    if bins == 0 or not len(table):
        return table
    moved = np.zeros_like(table)
    if bins > 0:
        moved[:, : VALUE_BINS - bins] = table[:, bins:]
        moved[:, 0] += table[:, :bins].sum(axis=1)
    else:
        moved[:, -bins:] = table[:, :bins]
        moved[:, -1] += table[:, bins:].sum(axis=1)
    return moved
