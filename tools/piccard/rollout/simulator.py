"""Whole rollouts over synthetic traffic, by the verdicts and the course that run the real ones."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from piccard_canary.rollout.course import (
    ENDED,
    Move,
    Phase,
    RolloutState,
    baking,
    entered,
    moved,
)
from piccard_canary.rollout.judgement import Verdict
from piccard_canary.rollout.plan import Plan
from piccard_canary.rollout.watcher import Watcher
from piccard_canary.rollout.window import LATENCIES

from piccard.rollout.synthetic import Behaviour, Scene, Traffic, golden_of


@dataclass(frozen=True, slots=True)
class Scenario:
    """One kind of rollout.

    Attributes:
        before: share of the traffic that a regression must not reach; None where there is none.
    """

    name: str
    plan: Plan
    stable: Behaviour
    canary: Behaviour
    traffic: Traffic = field(default_factory=Traffic)
    before: float | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """How one rollout ended.

    Attributes:
        reached: the largest share that the canary got.
        seconds: of its whole length.
        harmed: requests that failed or were truncated beyond what stable's rates would have done, or that a slower
            canary served.
        why: the reason of its end.
        verdicts: what the last look of each finished step said of each metric, by the step's share.
    """

    phase: Phase
    reached: float
    seconds: float
    harmed: int
    why: str
    verdicts: dict[float, dict[str, Verdict]]


def run(scenario: Scenario, seed: int) -> Run:
    """One rollout to its end, or until it waits for a person."""
    plan = scenario.plan
    scene = Scene(scenario.traffic, scenario.stable, scenario.canary, seed)
    # Requests that were there before the rollout, so that it does not begin with an idle stable version.
    scene.run(60, 0.0)
    now = 0.0
    state = RolloutState(plan=plan, canary=2, stable=1, started=now, since=now)
    watcher = Watcher(now)
    golden = golden_of(scenario.canary, seed)
    slower = max(scenario.canary.first_token, scenario.canary.token_gap) > 1.0
    harmed = 0.0
    verdicts: dict[float, dict[str, Verdict]] = {}
    while state.phase not in ENDED and state.phase is not Phase.PAUSED:
        ratio = 1.0 if state.phase is Phase.BAKING else state.ratio
        seconds = max(1, round(plan.look))
        canary, stable = scene.run(seconds, ratio)
        now += seconds
        watcher.take(canary, stable)
        answers = int((~canary.shadow).sum())
        harmed += answers if slower else canary.failed.sum() - answers * scenario.stable.errors
        looked = watcher.look(state, now, golden)
        if looked is not None:
            judgement, move = looked
            if state.phase is Phase.RUNNING:
                verdicts[state.ratio] = {name: one.verdict for name, one in judgement.metrics.items()}
            state = _done(moved(state, move, judgement, now), move, now)
        if watcher.since != state.since:
            watcher = Watcher(state.since)
    return Run(state.phase, state.ratio, now, max(0, round(harmed)), state.reason, verdicts)


def summary(scenario: Scenario, runs: list[Run]) -> dict[str, Any]:
    """Shares of how the runs ended, and what they cost."""
    ended = [one for one in runs if one.phase in (Phase.ABORTED, Phase.ROLLED_BACK)]
    found: dict[str, Any] = {
        "runs": len(runs),
        "promoted": _share(runs, lambda one: one.phase is Phase.PROMOTED),
        "aborted": _share(runs, lambda one: one.phase is Phase.ABORTED),
        "rolled_back": _share(runs, lambda one: one.phase is Phase.ROLLED_BACK),
        "waits_for_a_person": _share(runs, lambda one: one.phase is Phase.PAUSED),
        "stopped_at": {f"{step:g}": sum(one.reached == step for one in ended) for step in scenario.plan.steps},
        "median_seconds": median(one.seconds for one in runs),
        "median_requests_harmed": median(one.harmed for one in runs),
        "reasons": _reasons(ended),
        "latencies_at_5_percent": _latencies_at(runs, 0.05),
    }
    if scenario.before is not None:
        limit = scenario.before
        found["caught_before"] = limit
        found["caught"] = _share(runs, lambda one: one.phase is Phase.ABORTED and one.reached < limit)
        found["reached_it"] = _share(runs, lambda one: one.reached >= limit)
        found["median_seconds_to_detection"] = median([one.seconds for one in ended]) if ended else None
    return found


def described(scenario: Scenario) -> dict[str, Any]:
    """What a scenario was made of, for the results."""
    return {
        "stable": asdict(scenario.stable),
        "canary": asdict(scenario.canary),
        "traffic": asdict(scenario.traffic),
        "interval": scenario.plan.interval,
        "look": scenario.plan.look,
    }


def standard_scenarios(plan: Plan, base: float, rate: float = 50.0) -> list[Scenario]:
    """The regressions that a plan is held against.

    Args:
        base: error rate of both versions.
        rate: requests a second.
    """
    good = Behaviour(errors=base)
    traffic, steady = Traffic(rate=rate), Traffic(rate=rate, burst=0.0)
    mirrored = Traffic(rate=rate, burst=0.0, shadow=1.0)
    slow_gap, slow_first = replace(good, token_gap=1.2), replace(good, first_token=1.2)
    slow = replace(slow_gap, first_token=1.2)
    little = replace(good, first_token=1.09, token_gap=1.09)
    unlike = replace(good, golden_drop=0.2)
    errs, breaks = replace(good, errors=base + 0.02), replace(good, truncated=0.005)
    return [
        Scenario("equal", plan, good, good, traffic),
        Scenario("errors +2 points", plan, good, errs, traffic, before=0.25),
        Scenario("truncated +0.5 points", plan, good, breaks, traffic, before=0.5),
        Scenario("first token +20 %", plan, good, slow_first, traffic, before=0.5),
        Scenario("token gap +20 %", plan, good, slow_gap, traffic, before=0.5),
        Scenario("both latencies +20 %", plan, good, slow, traffic, before=0.5),
        Scenario("both latencies +9 %", plan, good, little, traffic, before=1.0),
        Scenario("golden prompts 0.2 nats a token lower", plan, good, unlike, traffic, before=0.05),
        Scenario("token gap +20 %, steady traffic", plan, good, slow_gap, steady, before=0.5),
        Scenario("equal, steady traffic", plan, good, good, steady),
        Scenario("token gap +20 %, steady traffic, mirrored", plan, good, slow_gap, mirrored, before=0.5),
        Scenario("equal, steady traffic, mirrored", plan, good, good, mirrored),
    ]


def _done(state: RolloutState, move: Move, now: float) -> RolloutState:
    """The state once its move was carried out."""
    if move is Move.ABORT:
        return entered(state, Phase.ABORTED, state.reason, now)
    if move is Move.ROLL_BACK:
        return entered(state, Phase.ROLLED_BACK, state.reason, now)
    if move is Move.PROMOTE:
        return baking(state, now)
    if state.phase is Phase.RETIRING:
        return entered(state, Phase.PROMOTED, state.reason, now)
    return state


def _share(runs: list[Run], holds: Callable[[Run], bool]) -> float:
    return sum(map(holds, runs)) / len(runs)


def _latencies_at(runs: list[Run], step: float) -> dict[str, float]:
    """Shares of the verdicts over both latencies, of the runs that had such a step."""
    found = [one.verdicts[step][name] for one in runs if step in one.verdicts for name in LATENCIES]
    return {verdict: sum(one is verdict for one in found) / len(found) for verdict in Verdict} if found else {}


def _reasons(runs: list[Run]) -> dict[str, int]:
    """Runs by the metrics that ended them."""
    found: dict[str, int] = {}
    for one in runs:
        name = "+".join(part.partition(":")[0] for part in one.why.split("; "))
        found[name] = found.get(name, 0) + 1
    return dict(sorted(found.items(), key=lambda item: -item[1]))
