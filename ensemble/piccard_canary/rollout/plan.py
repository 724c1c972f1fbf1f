"""What a rollout is to do: its steps, how long each is watched, and what is asked of each metric."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Kind = Literal["proportion", "latency", "tail", "throughput", "logprob"]

# Of these, least and margin are factors.
FACTORS = frozenset({"latency", "tail", "throughput"})


class MetricRule(BaseModel):
    """What is asked of one metric of the canary.

    Attributes:
        kind: proportion of requests, latency at equal load, the slowest hundredth of a latency, throughput (tokens a
            second of a stream at equal load), or log-probability of golden prompts.
        budget: its part of the error budget; where the parts of all metrics add up to more than 1 they are scaled to 1.
        tolerated: of a latency or throughput, the factor that counts as equal in the test.
        least: an estimate below it never fails, however sure: by how much the rate is higher (0.01 is a point), or a
            factor of the time, or of what a token takes of it. A log-probability fails when it is shown to be lower by
            more, in nats a token.
        margin: it passes when it is shown to be less than this much worse: the same units. A tail never passes.
        proved_from: share of the traffic from which it must pass; below, it can fail the canary and holds up nothing.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Kind
    budget: float = Field(gt=0, le=1)
    tolerated: float = Field(default=1.0, ge=1)
    least: float = Field(ge=0)
    margin: float = Field(gt=0)
    proved_from: float = Field(ge=0, le=2)


# A share of the traffic is 1 at most.
NEVER = 2.0


def default_metrics() -> dict[str, MetricRule]:
    """The rules of a rollout that names none."""
    slow = {"tolerated": 1.05, "least": 1.10, "margin": 1.16, "proved_from": 0.25}
    tail = {"tolerated": 1.10, "least": 1.25, "margin": 1.16, "proved_from": NEVER}
    return {
        "errors": MetricRule(kind="proportion", budget=0.35, least=0.0025, margin=0.01, proved_from=0.05),
        "truncated": MetricRule(kind="proportion", budget=0.2, least=0.002, margin=0.004, proved_from=0.25),
        "fallback": MetricRule(kind="proportion", budget=0.05, least=0.005, margin=0.01, proved_from=0.25),
        "first_token": MetricRule(kind="latency", budget=0.1, **slow),
        "token_gap": MetricRule(kind="latency", budget=0.1, **slow),
        # Tighter than either latency: what it loses is paid for in machines.
        "token_rate": MetricRule(
            kind="throughput", budget=0.05, tolerated=1.05, least=1.05, margin=1.10, proved_from=0.25
        ),
        "first_token_p99": MetricRule(kind="tail", budget=0.05, **tail),
        "token_gap_p99": MetricRule(kind="tail", budget=0.05, **tail),
        "golden_logprob": MetricRule(kind="logprob", budget=0.05, least=0.05, margin=0.10, proved_from=0.05),
    }


class Plan(BaseModel):
    """A rollout's plan.

    Attributes:
        steps: shares of the traffic, rising; the last is 1.
        interval: seconds that each step is watched at least.
        look: seconds between two looks at what was observed.
        min_samples: requests of the canary that a step needs to pass.
        gates: steps, by their share, that begin only after `piccard rollout approve`.
        hold: intervals after which a step that neither passed nor failed waits for a person.
        hysteresis: looks in a row that must pass.
        error_budget: probability that a canary which is not worse is aborted in the whole rollout, at most.
        confidence: normal quantile of the bounds by which a metric passes; 1.645 is 95 % one-sided.
        bake: seconds after the promotion in which the old version stays loaded and a failure rolls back to it.
        retire_old: whether the old version is retired after that.
        metrics: rules by metric; those that are left out have their default.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: Annotated[list[float], Field(max_length=20)] = [0.01, 0.05, 0.25, 0.5, 1.0]
    interval: float = Field(default=600.0, gt=0, le=7 * 86400)
    look: float = Field(default=15.0, gt=0, le=3600)
    min_samples: int = Field(default=100, ge=1)
    gates: list[float] = Field(default_factory=list)
    hold: int = Field(default=6, ge=1, le=1000)
    hysteresis: int = Field(default=2, ge=1, le=100)
    error_budget: float = Field(default=0.01, gt=0, lt=0.5)
    confidence: float = Field(default=1.645, gt=0, le=6)
    bake: float = Field(default=3600.0, ge=0, le=30 * 86400)
    retire_old: bool = False
    metrics: dict[str, MetricRule] = Field(default_factory=default_metrics)

    @field_validator("metrics")
    @classmethod
    def _all_metrics(cls, value: dict[str, MetricRule]) -> dict[str, MetricRule]:
        defaults = default_metrics()
        for name, rule in value.items():
            if name not in defaults:
                raise ValueError(f"{name!r} is no metric; there are {', '.join(defaults)}")
            if rule.kind != defaults[name].kind:
                raise ValueError(f"{name} is a {defaults[name].kind}, not a {rule.kind}")
            if rule.kind in FACTORS and min(rule.least, rule.margin) < 1:
                raise ValueError(f"{name}: least and margin are factors of the time, 1 or more")
            if rule.kind == "proportion" and max(rule.least, rule.margin) > 1:
                raise ValueError(f"{name}: least and margin are shares of the requests, 1 at most")
        return defaults | value

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if any(not 0 < step <= 1 for step in self.steps) or self.steps != sorted(set(self.steps)):
            raise ValueError("steps must be shares of the traffic over 0 that rise, such as [0.05, 0.5, 1.0]")
        if len(self.steps) < 2 or self.steps[-1] != 1.0:
            raise ValueError("the last step must be 1.0, and one below it: what passed beside stable is promoted")
        if unknown := [gate for gate in self.gates if gate not in self.steps]:
            raise ValueError(f"gates name no step: {unknown}; steps are {self.steps}")
        if self.look > self.interval:
            raise ValueError("look must not be longer than interval")
        return self

    def chance(self, name: str) -> float:
        """Probability with which a metric may fail a canary that is not worse in it, in the whole rollout."""
        # A plan that was written for fewer metrics has given all of the budget to those.
        total = sum(rule.budget for rule in self.metrics.values())
        return self.error_budget * self.metrics[name].budget / max(1.0, total)
