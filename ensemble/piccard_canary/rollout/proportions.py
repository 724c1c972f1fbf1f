"""Sequential tests on proportions of two versions: is the canary's rate of events higher, is it not much higher.

An event at equal rates came from the canary with probability r, its share of the requests; at a rate ratio q with
probability q r / (1 + r (q - 1)). The likelihood ratio of q against 1 after S events of the canary among N is
    q^S / (1 + r (q - 1))^N,
and its mean over a fixed distribution of q is a nonnegative martingale of mean 1 while the rates are equal: a mixture
SPRT. By Ville's inequality it ever exceeds 1/a with probability a at most, however often one looks (Robbins 1970,
"Statistical methods related to the law of the iterated logarithm"; Johari, Koomen, Pekelis and Walsh 2022, "Always
valid inference", Operations Research 70). Where events are not rare, S is hypergeometric, whose q^S is smaller on
average than the binomial's (Hoeffding 1963, theorem 4), so that the test errs on the safe side.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

# The rate ratios that are looked for, each with equal weight.
RATIOS = 2.0 ** np.arange(0.5, 6.5, 0.5)
_LOG_RATIOS = np.log(RATIOS)


@dataclass(frozen=True, slots=True)
class Trial:
    """Requests and events of both versions over the same time at the same ratio."""

    canary_requests: int
    canary_events: int
    stable_requests: int
    stable_events: int

    @property
    def share(self) -> float:
        """Of the requests that went to the canary."""
        total = self.canary_requests + self.stable_requests
        return self.canary_requests / total if total else 0.0


def log_evidence(trials: Sequence[Trial]) -> float:
    """Natural logarithm of the mixture's value over all `trials`; 0 where nothing was seen."""
    total = np.zeros(len(RATIOS))
    for trial in trials:
        total += trial.canary_events * _LOG_RATIOS
        total -= (trial.canary_events + trial.stable_events) * np.log1p(trial.share * (RATIOS - 1.0))
    top = float(total.max())
    return top + float(np.log(np.mean(np.exp(total - top))))


def excess_bound(trial: Trial, z: float) -> float:
    """Upper confidence bound of canary rate - stable rate, one-sided at the normal quantile `z`.

    Newcombe's hybrid of two Wilson intervals (Newcombe 1998, "Interval estimation for the difference between
    independent proportions", Statistics in Medicine 17, method 10).
    """
    canary, _, upper = wilson(trial.canary_events, trial.canary_requests, z)
    stable, lower, _ = wilson(trial.stable_events, trial.stable_requests, z)
    return canary - stable + sqrt((upper - canary) ** 2 + (stable - lower) ** 2)


def wilson(events: int, requests: int, z: float) -> tuple[float, float, float]:
    """Rate, lower and upper limit of Wilson's score interval; 0, 0 and 1 without requests."""
    if not requests:
        return 0.0, 0.0, 1.0
    rate = events / requests
    middle = (rate + z * z / (2 * requests)) / (1 + z * z / requests)
    half = z / (1 + z * z / requests) * sqrt(rate * (1 - rate) / requests + z * z / (4 * requests * requests))
    return rate, max(0.0, middle - half), min(1.0, middle + half)
