"""Verdicts over what both versions did: pass, fail or inconclusive, by metric and together."""

from collections.abc import Sequence
from functools import partial
from math import exp, log

from piccard_canary.rollout.golden import GoldenComparison
from piccard_canary.rollout.judgement import Counts, Judgement, MetricVerdict, Verdict
from piccard_canary.rollout.paired import chance_above, upper_bound
from piccard_canary.rollout.plan import FACTORS, MetricRule, Plan
from piccard_canary.rollout.proportions import Trial, excess_bound, log_evidence
from piccard_canary.rollout.ranks import Score, Strata, bins_of, quantile_bin, rank_score, ratio_estimate, tail_score
from piccard_canary.rollout.strata import bin_seconds
from piccard_canary.rollout.window import LATENCIES, THROUGHPUT, Window


def judge(
    plan: Plan,
    ratio: float,
    past: Sequence[Counts],
    canary: Window,
    stable: Window,
    golden: GoldenComparison | None = None,
) -> Judgement:
    """The verdict over a step in which both versions have traffic.

    Args:
        ratio: the canary's share.
        past: the steps before; their evidence counts on.
        canary, stable: what was seen in this step.
        golden: what both make of the golden prompts; None where that is not known yet.
    """
    strata = {name: Strata.shared(canary.tables[name], stable.tables[name]) for name in (*LATENCIES, THROUGHPUT)}
    counts = counts_of(plan, canary, stable, strata)
    steps = [*past, counts]
    metrics: dict[str, MetricVerdict] = {}
    for name, rule in plan.metrics.items():
        required = ratio >= rule.proved_from
        if rule.kind == "proportion":
            trials = [step.trial(name) for step in steps]
            metrics[name] = _proportion(plan, name, trials, trials[-1], required=required)
        elif rule.kind == "logprob":
            metrics[name] = _golden(plan, name, golden, required=required)
        else:
            scores = [step.score(name) for step in steps]
            metrics[name] = _latency(plan, name, strata[name.removesuffix("_p99")], scores, required=required)
    return _together(plan, metrics, counts)


def judge_alone(plan: Plan, reference: Counts, canary: Window, golden: GoldenComparison | None = None) -> Judgement:
    """The verdict while the canary has all traffic: rates against stable's in the last step that both shared.

    Latencies are not compared, for there is no equal load. Evidence begins anew: the reference has been used before.
    Golden prompts are compared as ever, for both versions are loaded.
    """
    counts = Counts(
        canary_requests=canary.requests,
        canary_events=dict(canary.events),
        stable_requests=reference.stable_requests,
        stable_events=reference.stable_events,
    )
    metrics: dict[str, MetricVerdict] = {}
    for name, rule in plan.metrics.items():
        if rule.kind == "proportion":
            metrics[name] = _proportion(plan, name, [counts.trial(name)], counts.trial(name), required=True)
        elif rule.kind == "logprob":
            metrics[name] = _golden(plan, name, golden, required=rule.proved_from <= 1.0)
    return _together(plan, metrics, counts)


def counts_of(plan: Plan, canary: Window, stable: Window, strata: dict[str, Strata]) -> Counts:
    """What a step leaves for those after it."""
    scores: dict[str, tuple[float, float]] = {}
    for name, rule in plan.metrics.items():
        if rule.kind in FACTORS:
            score = _score(rule, strata[name.removesuffix("_p99")], bins_of(rule.tolerated))
            scores[name] = (score.value, score.variance)
    return Counts(
        canary_requests=canary.requests,
        stable_requests=stable.requests,
        canary_events=dict(canary.events),
        stable_events=dict(stable.events),
        scores=scores,
    )


def _proportion(plan: Plan, name: str, trials: Sequence[Trial], now: Trial, *, required: bool) -> MetricVerdict:
    rule, needed = plan.metrics[name], -log(plan.chance(name))
    evidence = log_evidence(trials)
    canary = _rate(now.canary_events, now.canary_requests)
    stable = _rate(now.stable_events, now.stable_requests)
    found = MetricVerdict(
        verdict=Verdict.INCONCLUSIVE,
        required=required,
        canary=canary,
        stable=stable,
        difference=canary - stable,
        evidence=evidence,
        needed=needed,
    )
    if not now.canary_requests or not now.stable_requests:
        found.why = "no requests to compare"
        return found
    bound = found.bound = excess_bound(now, plan.confidence)
    if evidence >= needed and canary - stable >= rule.least:
        found.verdict = Verdict.FAIL
        found.why = f"{100 * canary:.2f} % against {100 * stable:.2f} %, by chance in {_chance(evidence)} at most"
    elif bound < rule.margin:
        found.verdict = Verdict.PASS
        found.why = f"at most {100 * bound:.2f} points higher"
    else:
        found.why = f"may be {100 * bound:.2f} points higher, {100 * rule.margin:g} are too many"
    return found


def _latency(plan: Plan, name: str, strata: Strata, scores: Sequence[Score], *, required: bool) -> MetricVerdict:
    rule, needed = plan.metrics[name], -log(plan.chance(name))
    total = sum(scores, Score())
    found = MetricVerdict(
        verdict=Verdict.INCONCLUSIVE,
        required=required,
        evidence=total.log_evidence() if total.value > 0 else 0.0,
        needed=needed,
        pairs=strata.pairs,
    )
    if not len(strata):
        found.why = "no load at which both have 30 requests"
        return found
    quantile = 0.99 if rule.kind == "tail" else 0.5
    found.canary, found.stable = (
        bin_seconds(quantile_bin(table, quantile)) for table in (strata.canary, strata.stable)
    )
    what = f"{name} takes"
    if rule.kind == "throughput":
        found.canary, found.stable = 1.0 / found.canary, 1.0 / found.stable
        what = f"{found.canary:.4g} tokens a second against {found.stable:.4g}: a token takes"
    score = partial(_score, rule, strata)
    if found.evidence >= needed and score(bins_of(rule.least)).value > 0:
        found.verdict = Verdict.FAIL
        found.difference = ratio_estimate(score)
        found.why = (
            f"{what} {found.difference:.2f} times as long at equal load, by chance in {_chance(found.evidence)} at most"
        )
    elif rule.kind == "tail":
        found.why = "nothing says that it is longer"
    elif score(bins_of(rule.margin)).z < -plan.confidence:
        found.verdict = Verdict.PASS
        found.difference = ratio_estimate(score)
        found.why = f"at equal load {what} less than {rule.margin:g} times as long"
    else:
        found.why = f"at equal load {what} perhaps {rule.margin:g} times as long"
    return found


def _golden(plan: Plan, name: str, golden: GoldenComparison | None, *, required: bool) -> MetricVerdict:
    """A version gives the same log-probabilities each time: the newest comparison counts alone, as one test."""
    rule, needed = plan.metrics[name], -log(plan.chance(name))
    found = MetricVerdict(verdict=Verdict.INCONCLUSIVE, required=required, needed=needed)
    if golden is None or golden.problem:
        found.why = "the golden prompts are not answered yet" if golden is None else golden.problem
        return found
    prompts = len(golden.canary)
    canary, stable = golden.without_number()
    if stable:
        found.why = f"stable gives no log-probability that is a number of {stable} golden prompts of {prompts}"
        return found
    if canary:
        found.verdict = Verdict.FAIL
        found.why = f"no log-probability that is a number of {canary} golden prompts of {prompts}"
        return found
    found.pairs = prompts
    drops, scale = golden.drops(), golden.bound_scale
    least, margin = rule.least * scale, rule.margin * scale
    found.canary, found.stable = golden.means()
    found.difference = found.stable - found.canary
    found.evidence = -log(chance_above(drops, least))
    bound = found.bound = upper_bound(drops, plan.confidence)
    told = f"{found.canary:.4f} {golden.unit} against {found.stable:.4f} over {prompts} golden prompts"
    if found.evidence >= needed:
        found.verdict = Verdict.FAIL
        found.why = f"{told}, more than {least:.3g} lower but for a chance of {_chance(found.evidence)} at most"
    elif bound < margin:
        found.verdict = Verdict.PASS
        found.why = f"{told}, less than {margin:.3g} lower"
    else:
        found.why = f"{told}: it may be {bound:.3g} lower, {margin:.3g} are too many"
    return found


def _together(plan: Plan, metrics: dict[str, MetricVerdict], counts: Counts) -> Judgement:
    failed = [f"{name}: {one.why}" for name, one in metrics.items() if one.verdict is Verdict.FAIL]
    if failed:
        return Judgement(verdict=Verdict.FAIL, why="; ".join(failed), metrics=metrics, counts=counts)
    open_ = [f"{name}: {one.why}" for name, one in metrics.items() if one.required and one.verdict is not Verdict.PASS]
    if counts.canary_requests < plan.min_samples:
        open_ = [f"{counts.canary_requests} requests of {plan.min_samples}", *open_]
    if open_:
        return Judgement(verdict=Verdict.INCONCLUSIVE, why="; ".join(open_), metrics=metrics, counts=counts)
    return Judgement(verdict=Verdict.PASS, why="nothing is worse", metrics=metrics, counts=counts)


def _score(rule: MetricRule, strata: Strata, bins: int) -> Score:
    return tail_score(strata, bins) if rule.kind == "tail" else rank_score(strata, bins)


def _rate(events: int, requests: int) -> float:
    return events / requests if requests else 0.0


def _chance(evidence: float) -> str:
    return f"{100 * exp(-evidence):.2g} %"
