"""Requests counted by stratum and by the bin of a value."""

import numpy as np
from numpy.typing import NDArray

from piccard_canary.rollout.strata import VALUE_BINS

Cells = NDArray[np.int64]


class Table:
    """How many requests there are in each stratum, and in each bin of it.

    Args:
        strata: how many there are.

    Attributes:
        cells: int64 [strata, VALUE_BINS].
        requests: int64 [strata], their sums: there are thousands of strata, in few of which there is anything, and
            every look asks for them.
    """

    __slots__ = ("cells", "requests")

    def __init__(self, strata: int) -> None:
        self.cells: Cells = np.zeros((strata, VALUE_BINS), dtype=np.int64)
        self.requests: Cells = np.zeros(strata, dtype=np.int64)

    def count(self, strata: NDArray[np.int64], bins: NDArray[np.int64]) -> None:
        """Take in one request each of `strata` and `bins`, [n] both."""
        np.add.at(self.cells.reshape(-1), strata * VALUE_BINS + bins, 1)
        np.add.at(self.requests, strata, 1)
