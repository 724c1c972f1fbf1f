"""Verdicts over what two versions did."""

import numpy as np
import pytest
from piccard_canary.rollout.golden import GoldenComparison, GoldenScore
from piccard_canary.rollout.judgement import Counts, Judgement, MetricVerdict, Verdict, figures
from piccard_canary.rollout.observations import Observations
from piccard_canary.rollout.plan import Plan
from piccard_canary.rollout.verdict import judge, judge_alone
from piccard_canary.rollout.window import Window

PLAN = Plan()

TOKENS = 20


def golden(
    drop: float = 0.0, *, prompts: int = 16, spread: float = 0.01, pieces: str = "ab", tokens: int = TOKENS
) -> GoldenComparison:
    """Prompts that the canary finds less likely by `drop` nats a token of stable's on average.

    Args:
        spread: by how much they differ in it, alternately more and less.
        pieces, tokens: of the canary's tokenizer; stable's are "ab", TOKENS.
    """
    drops = [drop + spread * (-1) ** number for number in range(prompts)]
    return GoldenComparison(
        canary=[GoldenScore(-TOKENS * (2.0 + one), (pieces,) * 30, tokens) for one in drops],
        stable=[GoldenScore(-TOKENS * 2.0, ("ab",) * 30, TOKENS)] * prompts,
        text_bytes=[4 * TOKENS] * prompts,
    )


EQUAL = golden()


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
            completion_tokens=np.full(requests, 40.0),
        )
    )
    return found


def verdict(
    ratio: float,
    canary: Window,
    stable: Window,
    past: list[Counts] | None = None,
    golden: GoldenComparison | None = EQUAL,
) -> Judgement:
    return judge(PLAN, ratio, past or [], canary, stable, golden)


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
        canary.tables[name].cells += table.cells
        canary.tables[name].requests += table.requests
    found = verdict(0.05, canary, stable)
    expected = Verdict.PASS if slow == 1.0 else Verdict.FAIL
    assert {found.metrics[name].verdict for name in ("first_token", "token_gap", "token_rate")} == {expected}
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
            completion_tokens=np.full(250, 40.0),
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
    assert judge_alone(PLAN, reference, window(12_000, errors=12), EQUAL).verdict is Verdict.PASS
    assert judge_alone(PLAN, reference, window(12_000, errors=12), golden(0.3)).verdict is Verdict.FAIL
    assert judge_alone(PLAN, reference, window(12_000, errors=12)).verdict is Verdict.INCONCLUSIVE
    worse = judge_alone(PLAN, reference, window(2000, errors=40))
    assert worse.verdict is Verdict.FAIL
    assert "token_gap" not in worse.metrics


def test_figures_survive_the_file() -> None:
    found = verdict(0.25, window(2500, errors=3, slow=1.2, seed=1), window(7500, errors=7, seed=2))
    assert Judgement.model_validate_json(found.model_dump_json()) == found


def small_loss(factor: float, *, canary_load: float = 20.0) -> Judgement:
    return verdict(0.5, window(12_000, slow=factor, load=canary_load, seed=1), window(12_000, seed=2))


def test_a_loss_of_tokens_a_second_fails_where_neither_latency_does() -> None:
    found = small_loss(1.085)
    assert found.verdict is Verdict.FAIL
    assert found.metrics["token_rate"].verdict is Verdict.FAIL
    assert {found.metrics[name].verdict for name in ("first_token", "token_gap")} == {Verdict.PASS}
    rate = found.metrics["token_rate"]
    # 0.1 s and 39 gaps of 10 ms for 40 tokens, and both longer by what is in flight.
    assert rate.stable == pytest.approx(40 / (0.49 * (1 + 20 / 48)), rel=0.03)
    assert rate.stable / rate.canary == pytest.approx(rate.difference, rel=0.06)
    assert "tokens a second against" in rate.why


def test_tokens_a_second_pass_and_need_equal_load() -> None:
    assert small_loss(1.0).metrics["token_rate"].verdict is Verdict.PASS
    apart = small_loss(1.3, canary_load=2.0).metrics["token_rate"]
    assert (apart.verdict, apart.known) == (Verdict.INCONCLUSIVE, False)


def test_shorter_answers_are_no_loss_of_tokens_a_second() -> None:
    """An answer of few tokens has fewer a second, for it waits as long for the first: only like ones are compared."""
    few = Window()
    random = np.random.default_rng(5)
    rows = 4000
    few.add(
        Observations(
            *(np.zeros(rows, dtype=bool) for _ in range(3)),
            first_token=0.142 * np.exp(0.2 * random.standard_normal(rows)),
            token_gap=0.0142 * np.exp(0.2 * random.standard_normal(rows)),
            first_load=np.full(rows, 20.0),
            gap_load=np.full(rows, 20.0),
            others=np.ones(rows),
            prompt_tokens=np.full(rows, 300.0),
            shadow=np.zeros(rows, dtype=bool),
            completion_tokens=np.full(rows, 4.0),
        )
    )
    found = verdict(0.5, few, window(4000, seed=2)).metrics["token_rate"]
    assert (found.verdict, found.known) == (Verdict.INCONCLUSIVE, False)


def golden_verdict(compared: GoldenComparison | None, ratio: float = 0.5) -> MetricVerdict:
    return verdict(ratio, window(5000, seed=1), window(5000, seed=2), golden=compared).metrics["golden_logprob"]


@pytest.mark.parametrize(
    ("drop", "spread", "expected"),
    [
        (0.0, 0.0, Verdict.PASS),
        (-0.5, 0.1, Verdict.PASS),
        (0.03, 0.05, Verdict.PASS),
        (0.2, 0.0, Verdict.FAIL),
        (0.2, 0.05, Verdict.FAIL),
        # Lower on the whole, but prompts differ too much in it to be sure.
        (0.2, 0.5, Verdict.INCONCLUSIVE),
        (0.0, 0.5, Verdict.INCONCLUSIVE),
    ],
)
def test_golden_prompts(drop: float, spread: float, expected: Verdict) -> None:
    found = golden_verdict(golden(drop, spread=spread))
    assert found.verdict is expected, found.why
    assert found.stable == pytest.approx(-2.0)
    assert found.difference == pytest.approx(drop, abs=1e-9)
    assert (found.pairs, found.required) == (16, True)
    assert f"{-2.0 - drop:.4f} nats a token against -2.0000 over 16 golden prompts" in found.why


@pytest.mark.parametrize(("drop", "expected"), [(0.0, Verdict.PASS), (0.2, Verdict.FAIL)])
@pytest.mark.parametrize(("pieces", "tokens"), [("a", TOKENS), ("abcd", TOKENS // 2)])
def test_other_tokenizers_are_compared_by_bytes(drop: float, expected: Verdict, pieces: str, tokens: int) -> None:
    found = golden_verdict(golden(drop, pieces=pieces, tokens=tokens))
    assert found.verdict is expected, found.why
    # Two nats a token of four bytes.
    assert found.stable == pytest.approx(-2.0 / np.log(2.0) / 4)
    assert found.difference == pytest.approx(drop / np.log(2.0) / 4)
    assert "bits a byte" in found.why


@pytest.mark.parametrize("compared", [None, GoldenComparison(problem="version 2 does not answer golden prompt 1: no")])
def test_without_answers_to_golden_prompts_nothing_is_said(compared: GoldenComparison | None) -> None:
    found = golden_verdict(compared)
    assert (found.verdict, found.known) == (Verdict.INCONCLUSIVE, False)
    assert found.why == (compared.problem if compared else "the golden prompts are not answered yet")
    whole = verdict(0.5, window(5000, seed=1), window(5000, seed=2), golden=compared)
    assert whole.verdict is Verdict.INCONCLUSIVE
    assert whole.why == f"golden_logprob: {found.why}"
    # At the first share it holds nothing up.
    assert not golden_verdict(compared, ratio=0.01).required


@pytest.mark.parametrize("number", [float("nan"), float("-inf"), float("inf")])
def test_what_is_no_number_fails_the_canary_and_says_nothing_where_it_is_stables(number: float) -> None:
    broken = [GoldenScore(number, ("ab",) * 30, TOKENS), *EQUAL.stable[1:]]
    bad = golden_verdict(GoldenComparison(broken, EQUAL.stable, EQUAL.text_bytes))
    assert (bad.verdict, bad.why) == (
        Verdict.FAIL,
        "no log-probability that is a number of 1 golden prompts of 16",
    )
    both = golden_verdict(GoldenComparison(broken, broken, EQUAL.text_bytes))
    assert both.verdict is Verdict.INCONCLUSIVE
    assert "stable gives no log-probability" in both.why
    for found in (bad, both):
        assert MetricVerdict.model_validate_json(found.model_dump_json()) == found


def test_looking_again_at_golden_prompts_spends_nothing() -> None:
    """A version says the same each time: a hundred looks say what one says, however close it is."""
    close = golden(0.08, spread=0.05)
    once = golden_verdict(close)
    assert once.verdict is Verdict.INCONCLUSIVE
    past: list[Counts] = []
    for _ in range(100):
        found = verdict(0.5, window(200), window(200), past, close)
        past.append(found.counts)
    assert found.metrics["golden_logprob"] == once


def test_figures_for_the_audit_log() -> None:
    told = figures(verdict(0.5, window(5000, seed=1), window(5000, seed=2)))
    assert told["golden_logprob"] == {"verdict": "pass", "canary": pytest.approx(-2.0), "stable": pytest.approx(-2.0)}
    assert set(told["token_rate"]) == {"verdict", "canary", "stable"}
    assert figures(verdict(0.5, Window(), Window(), golden=None))["golden_logprob"] == {"verdict": "inconclusive"}
