"""What a look at a rollout says, by metric and together, with the figures behind it."""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

from piccard_canary.rollout.proportions import Trial
from piccard_canary.rollout.ranks import Score


class Verdict(StrEnum):
    """What the statistics say. FAIL wins over INCONCLUSIVE, which wins over PASS."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


class MetricVerdict(BaseModel):
    """What is said of one metric, with its figures.

    Attributes:
        required: whether the step needs its pass.
        canary, stable: rates, medians over comparable strata in seconds (of a tail the 99th percentile) or in tokens a
            second, or mean log-probabilities.
        difference: points by which the rate is higher, the factor by which the latency is longer, that by which fewer
            tokens come in a second, or by how much the log-probability is lower.
        bound: of a proportion or log-probability, the upper confidence bound of the difference.
        evidence: against equality: probability of as much under equality is at most exp(-evidence).
        needed: the evidence at which it fails.
        pairs: requests in strata that could be compared, or golden prompts.
        why: one sentence.
    """

    model_config = ConfigDict(extra="forbid")

    verdict: Verdict
    required: bool
    canary: float = 0.0
    stable: float = 0.0
    difference: float = 0.0
    bound: float | None = None
    evidence: float = 0.0
    needed: float = 0.0
    pairs: int | None = None
    why: str = ""

    @property
    def known(self) -> bool:
        """Whether `canary` and `stable` are figures of anything."""
        return self.bound is not None or bool(self.pairs)


class Counts(BaseModel):
    """What a finished step leaves: requests, events, and the scores of the latencies."""

    model_config = ConfigDict(extra="forbid")

    canary_requests: int = 0
    stable_requests: int = 0
    canary_events: dict[str, int] = Field(default_factory=dict)
    stable_events: dict[str, int] = Field(default_factory=dict)
    scores: dict[str, tuple[float, float]] = Field(default_factory=dict)

    def trial(self, name: str) -> Trial:
        return Trial(
            self.canary_requests, self.canary_events.get(name, 0), self.stable_requests, self.stable_events.get(name, 0)
        )

    def score(self, name: str) -> Score:
        return Score(*self.scores.get(name, (0.0, 0.0)))


class Judgement(BaseModel):
    """The verdict over a step.

    Attributes:
        counts: of the step so far.
        why: what decided.
    """

    model_config = ConfigDict(extra="forbid")

    verdict: Verdict
    why: str
    metrics: dict[str, MetricVerdict] = Field(default_factory=dict)
    counts: Counts = Field(default_factory=Counts)


def figures(judgement: Judgement) -> dict[str, dict[str, str | float]]:
    """Verdict and figures by metric, as the audit log keeps them; a metric without data has its verdict alone."""
    told: dict[str, dict[str, str | float]] = {}
    for name, metric in judgement.metrics.items():
        told[name] = {"verdict": metric.verdict.value}
        if metric.known:
            told[name] |= {"canary": metric.canary, "stable": metric.stable}
    return told
