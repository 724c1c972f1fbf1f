"""What one version did in a window of time, added up."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from piccard_canary.rollout.observations import Observations
from piccard_canary.rollout.strata import (
    ANSWER_STRATA,
    STRATA,
    answer_stratum_of,
    condition_of,
    stratum_of,
    value_bin,
)
from piccard_canary.rollout.table import Table

PROPORTIONS = ("errors", "truncated", "fallback")
LATENCIES = ("first_token", "token_gap")
THROUGHPUT = "token_rate"

Floats = NDArray[np.float64]


def _tables() -> dict[str, Table]:
    return {name: Table(STRATA) for name in LATENCIES} | {THROUGHPUT: Table(ANSWER_STRATA)}


@dataclass(slots=True)
class Window:
    """One version's requests.

    Attributes:
        requests: how many that a client was answered, or not; mirrored ones are in the tables alone.
        events: of these, how many failed, were truncated, fell back, by the name of the proportion.
        tables: of each latency, and of what a token takes of a whole request (seconds, the inverse of tokens a
            second), the requests by stratum and bin of its value.
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
        known = ~seen.failed
        conditions = condition_of(seen.prompt_tokens, seen.others)
        first, gap = (_strata(load, conditions) for load in (seen.first_load, seen.gap_load))
        self._count("first_token", seen.first_token, first, known)
        self._count("token_gap", seen.token_gap, gap, known)
        seconds, load = _whole(seen)
        strata = answer_stratum_of(_strata(load, conditions), seen.completion_tokens)
        self._count(THROUGHPUT, seconds, strata, known)

    def _count(self, name: str, values: Floats, strata: NDArray[np.int64], known: NDArray[np.bool_]) -> None:
        known = known & ~np.isnan(values) & (strata >= 0)
        self.tables[name].count(strata[known], value_bin(values[known]))

    def rate(self, name: str) -> float:
        """Share of the requests with the event `name`; 0 without requests."""
        return self.events[name] / self.requests if self.requests else 0.0


def _strata(load: Floats, conditions: NDArray[np.int64]) -> NDArray[np.int64]:
    """The stratum of each request, [n]; negative where its load is not known."""
    return np.where(np.isnan(load), np.int64(-ANSWER_STRATA), stratum_of(load, conditions))


def _whole(seen: Observations) -> tuple[Floats, Floats]:
    """What a token takes of each whole request in seconds, and the mean load over it, [n] each; NaN where unknown.

    A request lasts from the router's receipt to its last token. With b requests in flight a version gives b tokens in
    the time that one of them takes (Little 1961), so at equal load this is what the version can deliver.
    """
    tokens = np.where(seen.completion_tokens > 0, seen.completion_tokens, np.nan)
    several = tokens > 1
    rest = np.where(several, seen.token_gap * (tokens - 1), 0.0)
    whole = seen.first_token + rest
    sent = np.where(several, seen.gap_load * rest, 0.0)
    load = np.divide(seen.first_load * seen.first_token + sent, whole, where=whole > 0, out=np.full_like(whole, np.nan))
    return whole / tokens, load
