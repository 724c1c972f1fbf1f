"""The last look at a rollout as metrics."""

import pytest
from piccard.rollout.samples import RolloutSamples, samples_of
from piccard.rollout.store import RolloutStore
from piccard_canary.rollout.course import Phase, RolloutState
from piccard_canary.rollout.judgement import Judgement, MetricVerdict, Verdict
from piccard_canary.rollout.plan import Plan
from piccard_contract.home import Service
from piccard_contract.metrics import METRIC_SPECS

JUDGEMENT = Judgement(
    verdict=Verdict.INCONCLUSIVE,
    why="so it is",
    metrics={
        "errors": MetricVerdict(verdict=Verdict.PASS, required=True, canary=0.01, stable=0.0, bound=0.02),
        "token_rate": MetricVerdict(verdict=Verdict.FAIL, required=True, canary=40.0, stable=50.0, pairs=60),
        "golden_logprob": MetricVerdict(verdict=Verdict.INCONCLUSIVE, required=True, why="not answered yet"),
    },
)


def state(**values: object) -> RolloutState:
    known = RolloutState(plan=Plan(), canary=2, stable=1, started=0.0, since=0.0, judgement=JUDGEMENT)
    return known.model_copy(update=values)


def found(service: Service, told: RolloutState | None) -> dict[tuple[str, ...], float]:
    return {
        (name, labels["version"], labels["metric"], labels.get("verdict", "")): value
        for name, labels, value in samples_of(service, told)
    }


def test_verdicts_and_figures(service: Service) -> None:
    samples = found(service, state())
    verdicts = {key[2:]: value for key, value in samples.items() if key[0] == "piccard_rollout_verdict"}
    assert {key for key, value in verdicts.items() if value == 1.0} == {
        ("errors", "pass"),
        ("token_rate", "fail"),
        ("golden_logprob", "inconclusive"),
    }
    assert len(verdicts) == 9
    figures = {key[1:3]: value for key, value in samples.items() if key[0] == "piccard_rollout_figure"}
    assert figures == {
        ("2", "errors"): 0.01,
        ("1", "errors"): 0.0,
        ("2", "token_rate"): 40.0,
        ("1", "token_rate"): 50.0,
    }


def test_labels_are_those_of_the_contract(service: Service) -> None:
    for name, labels, _ in samples_of(service, state()):
        assert set(labels) == set(METRIC_SPECS[name].labels)
        assert labels["service"] == service.name


@pytest.mark.parametrize("told", [None, state(judgement=None), state(phase=Phase.ABORTED)])
def test_without_a_look_there_is_none(service: Service, told: RolloutState | None) -> None:
    assert samples_of(service, told) == []


def test_they_follow_the_file(service: Service) -> None:
    samples, store = RolloutSamples(service), RolloutStore(service)
    assert samples.now() == []
    with store.locked():
        written = store.write(state())
    assert samples.now() == samples_of(service, written) != []
    service.rollout_file.write_text("{")
    assert samples.now() == []
    with store.locked():
        store.write(state(phase=Phase.PROMOTED))
    assert samples.now() == []
