"""What one version did in a window of time, added up."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from piccard_canary.rollout.observations import Observations
from piccard_canary.rollout.strata import STRATA, VALUE_BINS, stratum_of, value_bin

PROPORTIONS = ("errors", "truncated", "fallback")
LATENCIES = ("first_token", "token_gap")

Table = NDArray[np.int64]


def _tables() -> dict[str, Table]:
    return {name: np.zeros((STRATA, VALUE_BINS), dtype=np.int64) for name in LATENCIES}


@dataclass(slots=True)
class Window:
    """One version's requests.

    Attributes:
        requests: how many that a client was answered, or not; mirrored ones are in the tables alone.
        events: of these, how many failed, were truncated, fell back, by the name of the proportion.
        tables: of each latency the requests by stratum and bin of its value, int64 [strata, bins].
    """

    requests: int = 0
    events: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PROPORTIONS, 0))
    tables: dict[str, Table] = field(default_factory=_tables)

    def add(self, seen: Observations) -> None:
        """Take further requests in."""
        answers = ~seen.shadow
        self.requests += int(np.count_nonzero(answers))
        for name, flags in zip(PROPORTIONS, (seen.failed, seen.truncated, seen.fallback), strict=True):
            self.events[name] += int(np.count_nonzero(flags & answers))
        for name, values, load in (
            ("first_token", seen.first_token, seen.first_load),
            ("token_gap", seen.token_gap, seen.gap_load),
        ):
            known = ~(np.isnan(values) | np.isnan(load) | seen.failed)
            cells = stratum_of(load[known], seen.prompt_tokens[known], seen.others[known]) * VALUE_BINS
            cells += value_bin(values[known])
            np.add.at(self.tables[name].reshape(-1), cells, 1)

    def rate(self, name: str) -> float:
        """Share of the requests with the event `name`; 0 without requests."""
        return self.events[name] / self.requests if self.requests else 0.0
