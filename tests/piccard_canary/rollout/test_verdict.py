"""Verdicts over what two versions did."""

import numpy as np
import pytest
from piccard_canary.rollout.observations import Observations
from piccard_canary.rollout.plan import Plan
from piccard_canary.rollout.verdict import Counts, Judgement, Verdict, judge, judge_alone
from piccard_canary.rollout.window import Window

PLAN = Plan()


def window(
    requests: int,
    *,
    errors: int = 0,
    truncated: int = 0,
    load: float = 20.0,
    slow: float = 1.0,
    seed: int = 0,
    shadow: bool = False,
) -> Window:
    """Requests at a load that wanders by a tenth, which their latencies follow; the first ones fail."""
    random = np.random.default_rng(seed)
    loads = load * np.exp(0.1 * random.standard_normal(requests))
    times = slow * (1 + loads / 48) * np.exp(0.2 * random.standard_normal((2, requests)))
    order = np.arange(requests)
    found = Window()
    found.add(
        Observations(
            failed=order < errors,
            truncated=order < truncated,
            fallback=np.zeros(requests, dtype=bool),
            first_token=0.1 * times[0],
            token_gap=0.01 * times[1],
            first_load=loads,
            gap_load=loads,
            others=np.ones(requests),
            prompt_tokens=np.full(requests, 300.0),
            shadow=np.full(requests, shadow),
        )
    )
    return found


def verdict(ratio: float, canary: Window, stable: Window, past: list[Counts] | None = None) -> Judgement:
    return judge(PLAN, ratio, past or [], canary, stable)


def test_equal_versions_at_equal_load_pass() -> None:
    found = verdict(0.5, window(5000, errors=5, seed=1), window(5000, errors=5, seed=2))
    assert found.verdict is Verdict.PASS, found.why
    assert found.metrics["token_gap"].difference == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("slow", [1.2, 1.5])
def test_a_slower_version_fails(slow: float) -> None:
    found = verdict(0.25, window(2500, slow=slow, seed=1), window(7500, seed=2))
    assert found.verdict is Verdict.FAIL
    assert "token_gap" in found.why
    assert found.metrics["token_gap"].difference == pytest.approx(slow, rel=0.05)
    assert found.metrics["errors"].verdict is Verdict.PASS


def few_at_their_own_load(slow: float = 1.0) -> Window:
    """A canary at 5 % of the traffic, whose load is far below stable's."""
    return window(500, load=1.0, slow=slow, seed=3)


@pytest.mark.parametrize("slow", [1.0, 1.2])
def test_mirrored_requests_bring_a_verdict_where_there_is_no_load_in_common(slow: float) -> None:
    stable = window(9500, seed=2)
    found = verdict(0.05, few_at_their_own_load(slow), stable)
    assert found.metrics["token_gap"].verdict is Verdict.INCONCLUSIVE

    canary = few_at_their_own_load(slow)
    mirrored = window(2500, slow=slow, seed=1, shadow=True)
    for name, table in mirrored.tables.items():
        canary.tables[name] += table
    found = verdict(0.05, canary, stable)
    expected = Verdict.PASS if slow == 1.0 else Verdict.FAIL
    assert {found.metrics[name].verdict for name in ("first_token", "token_gap")} == {expected}
    # They are nobody's requests: neither samples, nor failures.
    assert (mirrored.requests, found.counts.canary_requests) == (0, 500)


def test_a_slow_tail_fails() -> None:
    canary = window(5000, seed=1)
    canary.add(
        Observations(
            *(np.zeros(250, dtype=bool) for _ in range(3)),
            first_token=np.full(250, 0.1),
            token_gap=np.full(250, 0.1),
            first_load=np.full(250, 20.0),
            gap_load=np.full(250, 20.0),
            others=np.ones(250),
            prompt_tokens=np.full(250, 300.0),
            shadow=np.zeros(250, dtype=bool),
        )
    )
    found = verdict(0.5, canary, window(5000, seed=2))
    assert found.metrics["token_gap_p99"].verdict is Verdict.FAIL
    assert found.metrics["first_token_p99"].verdict is not Verdict.FAIL


@pytest.mark.parametrize("slow", [1.0, 1.2])
def test_at_another_load_nothing_is_said(slow: float) -> None:
    """At a twentieth of the traffic even a slower version is quicker: neither a pass by luck nor a fail."""
    canary, stable = window(1500, load=2.0, slow=slow, seed=1), window(28500, load=45.0, seed=2)
    at_five = verdict(0.05, canary, stable)
    assert at_five.metrics["token_gap"].verdict is Verdict.INCONCLUSIVE
    assert at_five.verdict is Verdict.PASS, "below its share a latency holds up nothing"
    at_half = verdict(0.5, canary, stable)
    assert at_half.verdict is Verdict.INCONCLUSIVE
    assert "no load at which both have 30 requests" in at_half.why


def test_errors_fail_soon() -> None:
    found = verdict(0.05, window(600, errors=13), window(11400, errors=11))
    assert found.verdict is Verdict.FAIL
    assert found.why.startswith("errors: 2.17 % against 0.10 %")


def test_evidence_of_earlier_steps_counts() -> None:
    few = window(100, errors=3), window(1900, errors=2)
    alone = verdict(0.05, *few)
    assert alone.verdict is not Verdict.FAIL
    assert verdict(0.05, *few, past=[alone.counts]).verdict is Verdict.FAIL


def test_an_excess_too_small_to_matter_does_not_fail() -> None:
    """However sure: 0.2 % against 0.1 %."""
    found = verdict(0.5, window(200_000, errors=400), window(200_000, errors=200))
    assert found.metrics["errors"].evidence > found.metrics["errors"].needed
    assert found.metrics["errors"].verdict is Verdict.PASS


@pytest.mark.parametrize("canary", [0, 99])
def test_without_enough_requests_nothing_passes(canary: int) -> None:
    found = verdict(0.01, window(canary), window(10_000, errors=10))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert f"{canary} requests of 100" in found.why


def test_without_any_data_nothing_passes() -> None:
    assert verdict(0.05, Window(), Window()).verdict is Verdict.INCONCLUSIVE
    assert judge_alone(PLAN, Counts(), Window()).verdict is Verdict.INCONCLUSIVE
    # Stable was never seen: nothing to compare with.
    assert judge_alone(PLAN, Counts(), window(10_000)).verdict is Verdict.INCONCLUSIVE


def test_truncated_streams_fail() -> None:
    found = verdict(0.25, window(3000, errors=18, truncated=18), window(9000, errors=9, truncated=0))
    assert found.verdict is Verdict.FAIL
    assert found.metrics["truncated"].verdict is Verdict.FAIL


def test_alone_it_is_held_against_stable_as_it_was() -> None:
    reference = verdict(0.5, window(6000, errors=6), window(6000, errors=6)).counts
    assert judge_alone(PLAN, reference, window(12_000, errors=12)).verdict is Verdict.PASS
    worse = judge_alone(PLAN, reference, window(2000, errors=40))
    assert worse.verdict is Verdict.FAIL
    assert "token_gap" not in worse.metrics


def test_figures_survive_the_file() -> None:
    found = verdict(0.25, window(2500, errors=3, slow=1.2, seed=1), window(7500, errors=7, seed=2))
    assert Judgement.model_validate_json(found.model_dump_json()) == found
