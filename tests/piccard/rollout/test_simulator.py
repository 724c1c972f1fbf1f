"""The simulator: seeded, by the code of real rollouts, and quick to tell good from bad."""

import numpy as np
import pytest
from piccard.rollout.simulator import run, standard_scenarios, summary
from piccard.rollout.synthetic import Behaviour, Scene, Traffic
from piccard_canary.rollout.course import Phase
from piccard_canary.rollout.judgement import Verdict
from piccard_canary.rollout.plan import Plan

PLAN = Plan(interval=240.0, look=60.0, bake=60.0)
SCENARIOS = {scenario.name: scenario for scenario in standard_scenarios(PLAN, 0.001)}


def test_a_seed_is_a_rollout() -> None:
    scenario = SCENARIOS["errors +2 points"]
    assert run(scenario, 7) == run(scenario, 7)
    assert {run(scenario, seed).seconds for seed in range(4)} != {run(scenario, 7).seconds}


def test_latency_follows_the_load() -> None:
    scene = Scene(Traffic(), Behaviour(), Behaviour(), seed=1)
    scene.run(60, 0.05)
    canary, stable = scene.run(120, 0.05)
    assert len(stable) > 10 * len(canary) > 0
    assert np.median(stable.gap_load) > 5 * np.median(canary.gap_load)
    # What a comparison of all requests would say of an equal version.
    assert np.median(canary.token_gap) < 0.8 * np.median(stable.token_gap)


def test_an_equal_version_is_promoted() -> None:
    found = run(SCENARIOS["equal"], 0)
    assert (found.phase, found.reached) == (Phase.PROMOTED, 1.0)
    # At a twentieth of the traffic its latency is neither passed by luck nor failed.
    assert {found.verdicts[0.05][name] for name in ("first_token", "token_gap")} == {Verdict.INCONCLUSIVE}


@pytest.mark.parametrize("name", [name for name, found in SCENARIOS.items() if found.before and "steady" not in name])
def test_regressions_are_caught(name: str) -> None:
    scenario = SCENARIOS[name]
    runs = [run(scenario, seed) for seed in range(2)]
    assert [one.phase for one in runs] == [Phase.ABORTED, Phase.ABORTED]
    assert max(one.reached for one in runs) < scenario.before
    assert summary(scenario, runs)["caught"] == 1.0


def test_without_equal_load_a_person_is_asked() -> None:
    """Traffic that never wanders has no load at which both versions are seen: nobody guesses."""
    scenario = SCENARIOS["token gap +20 %, steady traffic"]
    found = run(scenario, 0)
    assert (found.phase, found.reached) == (Phase.PAUSED, 0.25)
    assert "token_gap: no load at which both have 30 requests" in found.why


def test_mirrored_requests_fill_the_canary_up_to_stables_load() -> None:
    scene = Scene(Traffic(shadow=1.0), Behaviour(errors=0.2), Behaviour(errors=0.2), seed=1)
    scene.run(60, 0.05)
    canary, stable = scene.run(240, 0.05)
    assert not stable.shadow.any()
    assert canary.shadow.sum() > 5 * (~canary.shadow).sum() > 0
    # One that failed is no half of a pair.
    assert canary.failed[~canary.shadow].any()
    assert not canary.failed[canary.shadow].any()
    assert np.median(canary.gap_load) == pytest.approx(np.median(stable.gap_load), rel=0.1)
    assert np.median(canary.token_gap) == pytest.approx(np.median(stable.token_gap), rel=0.03)


def test_with_mirrored_requests_nobody_has_to_be_asked() -> None:
    slower = run(SCENARIOS["token gap +20 %, steady traffic, mirrored"], 0)
    assert (slower.phase, slower.reached) == (Phase.ABORTED, 0.01)
    assert slower.why.startswith("token_gap")
    equal = run(SCENARIOS["equal, steady traffic, mirrored"], 0)
    assert equal.phase is Phase.PROMOTED


@pytest.mark.parametrize(
    ("name", "ended"),
    [
        ("equal", (Phase.PROMOTED, 1.0, 1440.0, 1)),
        ("errors +2 points", (Phase.ABORTED, 0.05, 420.0, 5)),
        ("first token +20 %", (Phase.ABORTED, 0.25, 630.0, 2326)),
        ("both latencies +9 %", (Phase.ABORTED, 0.25, 780.0, 4036)),
        ("equal, steady traffic", (Phase.PAUSED, 0.25, 1920.0, 4)),
        ("token gap +20 %, steady traffic, mirrored", (Phase.ABORTED, 0.01, 30.0, 15)),
    ],
)
def test_the_measured_rollouts_are_these(name: str, ended: tuple[Phase, float, float, int]) -> None:
    """Seed 0 of scenarios of the benchmark: where an end changes, what it has measured is of other verdicts."""
    plan = Plan(interval=240.0, look=30.0, bake=240.0)
    scenario = next(one for one in standard_scenarios(plan, 0.001) if one.name == name)
    found = run(scenario, 0)
    assert (found.phase, found.reached, found.seconds, found.harmed) == ended
