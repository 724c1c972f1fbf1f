"""The controller over a service whose server is a double: every way that a rollout goes, killed at every write."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from operated_service import OperatedService
from piccard.canary import canary_off, canary_set
from piccard.errors import OperationError
from piccard.policy_store import load_policy
from piccard.promote import promote
from piccard.rollback import rollback
from piccard.rollout.commands import abort, approve, pause, resume, start, status
from piccard.rollout.controller import Controller
from piccard.rollout.synthetic import Behaviour, golden_of
from piccard_canary.rollout.course import Phase
from piccard_canary.rollout.golden import GoldenComparison
from piccard_canary.rollout.judgement import Verdict
from piccard_contract.lifecycle import VersionState
from piccard_contract.process_lock import AlreadyHeldError
from piccard_server import make_scripted_home
from rollout_scene import PLAN, REQUESTS, RolloutScene

NewScene = Callable[..., RolloutScene]


@pytest.fixture
def new_scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NewScene]:
    """Makes a service with a rollout of version 2; the one before is let go."""
    make_scripted_home(tmp_path / "template")
    monkeypatch.setattr("piccard.doctor.problems", lambda *_, **__: [])
    made: list[RolloutScene] = []

    def close() -> None:
        for scene in made:
            scene.close()
            scene.world.close()
        made.clear()

    def make(**plan: object) -> RolloutScene:
        close()
        home = tmp_path / "home"
        shutil.rmtree(home, ignore_errors=True)
        shutil.copytree(tmp_path / "template", home, symlinks=True)
        world = OperatedService(home)
        world.restart()
        made.append(RolloutScene(world, PLAN.model_copy(update=plan)))
        return made[-1]

    yield make
    close()


def state_of(scene: RolloutScene, version: int) -> VersionState:
    return scene.world.store.read().versions[version].state


def check_promoted(scene: RolloutScene) -> None:
    state = scene.state()
    assert state.phase is Phase.PROMOTED, (state.phase, state.reason, scene.said)
    assert scene.world.store.read().stable == 2
    assert load_policy(scene.service).canary is None
    assert state_of(scene, 1) in (VersionState.DRAINING, VersionState.RETIRED)
    scene.world.given_up.add(1)
    scene.world.server.finish_streams()
    scene.world.look_after()
    scene.world.check()


def check_aborted(scene: RolloutScene) -> None:
    state = scene.state()
    assert state.phase is Phase.ABORTED, (state.phase, state.reason, scene.said)
    policy = load_policy(scene.service)
    assert (policy.canary, policy.traffic_ratio) == (None, 0.0)
    assert scene.world.store.read().stable == 1
    # Once it was taken away no traffic came back.
    away = scene.ratios.index(0.0)
    assert set(scene.ratios[away:]) == {0.0}
    scene.world.check()


def good(scene: RolloutScene, fault: tuple[str, int] | None = None) -> None:
    scene.run(fault)
    check_promoted(scene)


def bad_from_the_start(scene: RolloutScene, fault: tuple[str, int] | None = None) -> None:
    scene.errors = 0.5
    state = scene.run(fault)
    check_aborted(scene)
    assert "errors: 50.00 % against 0.00 %" in state.reason
    assert state.judgement is not None
    assert state.judgement.metrics["errors"].verdict is Verdict.FAIL


def bad_in_its_bake_time(scene: RolloutScene, fault: tuple[str, int] | None = None) -> None:
    scene.run(fault, most=0)
    left = fault
    for _ in range(60):
        scene.tick(left)
        passed = len(scene.world.points.passed)
        left = None if left is None or left[1] < passed else (left[0], left[1] - passed)
        scene.points_passed += passed
        scene.errors = 0.5 if scene.state().phase is Phase.BAKING else 0.0
        if scene.state().phase in (Phase.ROLLED_BACK, Phase.PROMOTED):
            break
    assert scene.state().phase is Phase.ROLLED_BACK, scene.said
    assert scene.world.store.read().stable == 1
    assert state_of(scene, 2) is VersionState.PREVIOUS
    scene.world.check()


@pytest.mark.parametrize("course", [good, bad_from_the_start, bad_in_its_bake_time], ids=lambda one: one.__name__)
@pytest.mark.parametrize("kind", ["kill", "fail"])
def test_fault_at_every_write(new_scene: NewScene, course: Callable[..., None], kind: str) -> None:
    """Whoever comes after goes on, without a repair, and it ends as it would have; of failing writes every third."""
    at = 0
    while True:
        scene = new_scene()
        course(scene, (kind, at))
        if scene.points_passed <= at:
            break
        assert scene.kills == (kind == "kill")
        at += 1 if kind == "kill" else 3
    assert at >= 5, "a course that writes nothing proves nothing"


def test_steps_and_figures(new_scene: NewScene) -> None:
    scene = new_scene()
    good(scene)
    seen = list(dict.fromkeys(scene.ratios))
    assert seen == [0.05, 0.5, 1.0, 0.0]
    told = [event.what for event in scene.state().events]
    assert told[:3] == ["started beside version 1", "step 0.5", "step 1"]
    assert len(scene.state().past) == 2


def audited(scene: RolloutScene, phase: str) -> dict[str, dict[str, Any]]:
    """The figures in the last line of the audit log that tells of a phase."""
    told = [json.loads(line)["to"] for line in scene.service.audit_log.read_text().splitlines()]
    metrics: dict[str, dict[str, Any]] = [line["metrics"] for line in told if line.get("phase") == phase][-1]
    return metrics


def test_the_audit_log_keeps_figures(new_scene: NewScene) -> None:
    scene = new_scene(gates=[1.0])
    assert scene.run().phase is Phase.WAITING
    kept = audited(scene, "waiting")
    assert kept["errors"] == {"verdict": "pass", "canary": 0.0, "stable": 0.0}
    # 0.1 s and four gaps of 10 ms for five tokens.
    for version in ("canary", "stable"):
        assert kept["token_rate"][version] == pytest.approx(5 / 0.14, rel=0.03)
        assert kept["golden_logprob"][version] == pytest.approx(-1.0, abs=0.05)


def test_a_canary_that_turns_bad_at_half(new_scene: NewScene) -> None:
    scene = new_scene()
    while scene.state().step == 0:
        scene.tick()
    scene.errors = 0.5
    scene.run()
    check_aborted(scene)


def test_ratio_falls_before_anything_is_written_down(new_scene: NewScene) -> None:
    """Killed right after its first write, an abort has taken the traffic away."""
    scene = new_scene()
    scene.tick()
    assert load_policy(scene.service).traffic_ratio == 0.05
    scene.errors = 0.5
    scene.tick(("kill", 1))
    assert scene.kills == 1
    assert scene.state().phase is Phase.RUNNING
    assert load_policy(scene.service).traffic_ratio == 0.0
    scene.run()
    check_aborted(scene)
    assert "errors" in scene.state().reason


def test_two_controllers_cannot_act(new_scene: NewScene) -> None:
    scene = new_scene()
    scene.controller()
    with pytest.raises(AlreadyHeldError):
        Controller(scene.service, print)
    assert status(scene.service)["controller"] is not None
    scene.close()
    Controller(scene.service, print).close()
    assert status(scene.service)["controller"] is None


def test_without_requests_nothing_passes(new_scene: NewScene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = new_scene()
    monkeypatch.setattr(scene, "requests", lambda: None)
    state = scene.run()
    assert (state.phase, state.step) == (Phase.PAUSED, 0)
    assert "neither pass nor fail in 3 intervals: 0 requests of 50" in state.reason
    # A person who knows better may go on.
    approve(scene.service)
    scene.tick()
    assert load_policy(scene.service).traffic_ratio == 0.5


def test_pause_and_resume(new_scene: NewScene) -> None:
    scene = new_scene()
    scene.tick()
    assert pause(scene.service).changed
    assert not pause(scene.service).changed
    for _ in range(10):
        scene.tick()
    assert (scene.state().phase, scene.state().step) == (Phase.PAUSED, 0)
    assert resume(scene.service).changed
    good(scene)


def test_a_paused_canary_that_fails_is_aborted(new_scene: NewScene) -> None:
    scene = new_scene()
    scene.tick()
    pause(scene.service)
    scene.errors = 0.5
    scene.tick()
    check_aborted(scene)


def test_a_gate_waits_for_approval(new_scene: NewScene) -> None:
    scene = new_scene(gates=[0.5])
    with pytest.raises(OperationError, match="the rollout is running; this is for one that is waiting or paused"):
        approve(scene.service)
    assert scene.run().phase is Phase.WAITING
    for _ in range(3):
        scene.tick()
    assert load_policy(scene.service).traffic_ratio == 0.05
    approve(scene.service)
    good(scene)


def test_abort_by_hand_needs_no_controller(new_scene: NewScene) -> None:
    scene = new_scene()
    scene.tick()
    scene.close()
    abort(scene.service, "the model is rude")
    assert load_policy(scene.service).traffic_ratio == 0.0
    scene.ratios.append(0.0)
    scene.run()
    check_aborted(scene)
    assert scene.state().reason == "the model is rude"
    with pytest.raises(OperationError, match="no rollout is under way"):
        abort(scene.service, "again")


def test_another_start_is_refused_until_the_end(new_scene: NewScene) -> None:
    scene = new_scene()
    with pytest.raises(OperationError, match="a rollout of version 2 is running"):
        start(scene.world.operation(), 2, PLAN)
    scene.tick()
    abort(scene.service, "")
    scene.tick()
    start(scene.world.operation(), 2, PLAN)


@pytest.mark.parametrize("version", [1, 9])
def test_what_cannot_be_rolled_out(new_scene: NewScene, version: int) -> None:
    scene = new_scene()
    abort(scene.service, "")
    scene.tick()
    with pytest.raises(OperationError, match=r"stable already|no version 9"):
        start(scene.world.operation(), version, PLAN)


def test_people_who_change_the_traffic_are_not_fought(new_scene: NewScene) -> None:
    scene = new_scene()
    scene.tick()
    scene.world.run(lambda op: canary_set(op, 2, 0.3))
    scene.tick()
    assert scene.state().phase is Phase.PAUSED
    assert "the ratio was set to 0.3 by somebody else" in scene.state().reason
    scene.tick()
    assert load_policy(scene.service).traffic_ratio == 0.3
    resume(scene.service)
    scene.tick()
    assert load_policy(scene.service).traffic_ratio == 0.05

    scene.world.run(canary_off)
    scene.run()
    check_aborted(scene)
    assert scene.state().reason == "version 2 is the canary no more"


def test_a_promotion_by_hand_ends_it(new_scene: NewScene) -> None:
    scene = new_scene()
    scene.tick()
    scene.world.run(lambda op: promote(op, 2))
    state = scene.run()
    assert (state.phase, state.reason) == (Phase.ABORTED, "version 2 was made stable")
    assert scene.world.store.read().stable == 2


def test_a_rollback_by_hand_in_the_bake_time_ends_it(new_scene: NewScene) -> None:
    scene = new_scene()
    while scene.state().phase is not Phase.BAKING:
        scene.tick()
    scene.world.run(rollback)
    scene.tick()
    assert scene.state().phase is Phase.ROLLED_BACK
    assert scene.world.store.read().stable == 1


def test_a_canary_that_was_given_up_is_aborted(new_scene: NewScene) -> None:
    scene = new_scene()
    scene.tick()
    scene.world.dies(2, for_good=True)
    scene.run()
    check_aborted(scene)
    assert "version 2 is failed" in scene.state().reason


def left_in(scene: RolloutScene, phase: Phase) -> None:
    """As a controller leaves it that was killed before it did what the phase says."""
    while scene.state().phase is not Phase.BAKING and (scene.state().ratio < 1.0 or not scene.state().applied):
        scene.tick()
    if phase is not Phase.PROMOTING:
        while scene.state().phase is not Phase.BAKING:
            scene.tick()
    scene.close()
    scene.store.write(scene.state().model_copy(update={"phase": phase}))


def test_a_canary_that_dies_while_it_is_promoted_loses_its_traffic(new_scene: NewScene) -> None:
    scene = new_scene()
    left_in(scene, Phase.PROMOTING)
    scene.world.dies(2, for_good=True)
    scene.run()
    check_aborted(scene)


def test_what_people_did_while_nobody_promoted_stands(new_scene: NewScene) -> None:
    for change in (canary_off, lambda op: canary_set(op, 2, 0.0)):
        scene = new_scene()
        left_in(scene, Phase.PROMOTING)
        scene.world.run(change)
        assert scene.run().phase is Phase.ABORTED
        assert (scene.world.store.read().stable, load_policy(scene.service).traffic_ratio) == (1, 0.0)


@pytest.mark.parametrize("phase", [Phase.BAKING, Phase.ROLLING_BACK, Phase.RETIRING])
def test_what_people_made_stable_stays_so(new_scene: NewScene, phase: Phase) -> None:
    scene = new_scene()
    left_in(scene, phase)
    scene.world.run(rollback)
    assert scene.run().phase is Phase.ROLLED_BACK
    assert scene.world.store.read().stable == 1
    assert state_of(scene, 1) is VersionState.STABLE


def test_an_old_version_that_got_another_part_is_not_retired(new_scene: NewScene) -> None:
    scene = new_scene()
    left_in(scene, Phase.RETIRING)
    scene.world.run(lambda op: canary_set(op, 1, 0.1))
    assert scene.run().phase is Phase.PROMOTED
    assert state_of(scene, 1) is VersionState.CANARY


@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.PAUSED, Phase.BAKING])
def test_a_clock_that_is_set_back_hides_no_failure(new_scene: NewScene, phase: Phase) -> None:
    scene = new_scene()
    scene.tick()
    if phase is Phase.PAUSED:
        pause(scene.service)
    while scene.state().phase is not phase:
        scene.tick()
    scene.now -= 7200.0
    scene.errors = 0.5
    for _ in range(3):
        scene.tick()
    assert scene.state().phase is (Phase.ROLLED_BACK if phase is Phase.BAKING else Phase.ABORTED)


def test_a_clock_that_is_set_back_makes_no_request_count_twice(new_scene: NewScene) -> None:
    scene = new_scene(interval=1000.0, look=10.0)
    for _ in range(4):
        scene.tick()
    before = scene.state()
    scene.now -= 7200.0
    scene.tick()
    scene.tick()
    after = scene.state()
    assert after.since < before.since
    assert before.judgement is not None
    assert after.judgement is not None
    assert [counts.canary_requests for counts in after.past] == [before.judgement.counts.canary_requests]
    # Those that came since, and none of the lines that seem to lie in the future.
    assert after.judgement.counts.canary_requests == REQUESTS


def test_a_log_that_cannot_be_opened_once_is_read_the_next_time(
    new_scene: NewScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = new_scene()
    scene.errors = 0.5
    with monkeypatch.context() as once:
        once.setattr("piccard.rollout.request_tail._aside", lambda _: [scene.service.home / "gone"])
        scene.tick()
    scene.run()
    check_aborted(scene)


def test_what_ends_a_rollout_is_told_to_who_starts_another(new_scene: NewScene) -> None:
    scene = new_scene()
    told = {Phase.PAUSED: "rollout abort", Phase.BAKING: "piccard rollback", Phase.PROMOTING: "ends by itself"}
    for phase, what in told.items():
        scene.store.write(scene.state().model_copy(update={"phase": phase}))
        with pytest.raises(OperationError, match=f"is {phase}; .*{what}"):
            start(scene.world.operation(), 2, PLAN)


@pytest.mark.parametrize("broken", [b"traffic_ratio: [", b"# f\xfcr", b"since: 2026-02-30"])
def test_a_broken_policy_stands_in_no_ones_way(new_scene: NewScene, broken: bytes) -> None:
    scene = new_scene()
    scene.tick()
    scene.errors = 0.5
    scene.requests()
    scene.service.policy_file.write_bytes(broken)
    scene.now += PLAN.look
    scene.controller().tick()
    scene.ratios = [0.0]
    check_aborted(scene)


def test_a_canary_that_finds_golden_prompts_less_likely_is_aborted(new_scene: NewScene) -> None:
    scene = new_scene()
    scene.golden = golden_of(Behaviour(golden_drop=0.5), seed=1)
    scene.run()
    check_aborted(scene)
    assert scene.state().ratio == 0.05
    assert "golden_logprob: -1.5" in scene.state().reason
    assert "nats a token against -1.0000 over 16 golden prompts" in scene.state().reason
    kept = audited(scene, "aborting")
    assert kept["golden_logprob"]["verdict"] == "fail"
    assert kept["golden_logprob"]["canary"] == pytest.approx(-1.5, abs=0.05)


def test_a_bad_answer_in_the_bake_time_rolls_back(new_scene: NewScene) -> None:
    scene = new_scene()
    while scene.state().phase is not Phase.BAKING:
        scene.tick()
    scene.golden = golden_of(Behaviour(golden_drop=0.5), seed=1)
    scene.tick()
    assert scene.state().phase is Phase.ROLLED_BACK, scene.said
    assert scene.world.store.read().stable == 1


def test_golden_prompts_are_asked_once_a_step(new_scene: NewScene) -> None:
    scene = new_scene(interval=100.0)
    for _ in range(5):
        scene.tick()
    assert (scene.state().step, scene.asked) == (0, 1)
    scene = new_scene()
    good(scene)
    # Two steps beside stable, one alone, and the bake time.
    assert scene.asked == 4


def test_nobody_meets_a_canary_before_its_golden_prompts_are_answered(new_scene: NewScene) -> None:
    scene = new_scene(interval=30.0)
    # Nobody has set a ratio by hand.
    scene.world.run(canary_off)
    found, scene.golden = scene.golden, None
    scene.tick()
    scene.tick()
    assert (scene.state().applied, load_policy(scene.service).canary) == (False, None)
    scene.golden = found
    scene.close()
    scene.tick()
    assert scene.state().applied
    assert load_policy(scene.service).traffic_ratio == 0.05


def test_wrong_weights_meet_nobody(new_scene: NewScene) -> None:
    scene = new_scene()
    scene.world.run(canary_off)
    scene.golden = golden_of(Behaviour(golden_drop=0.5), seed=1)
    scene.ratios.append(0.0)
    scene.run()
    check_aborted(scene)
    assert not scene.state().applied
    assert max(scene.ratios) == 0.0


def test_golden_prompts_that_nobody_answers_hold_up_the_first_step_for_an_interval(new_scene: NewScene) -> None:
    scene = new_scene()
    scene.golden = None
    scene.tick()
    assert not scene.state().applied
    scene.tick()
    assert scene.state().applied


@pytest.mark.parametrize("golden", [None, GoldenComparison(problem="version 2 does not answer golden prompt 3: no")])
def test_without_answers_to_golden_prompts_a_person_is_asked(
    new_scene: NewScene, golden: GoldenComparison | None
) -> None:
    scene = new_scene()
    scene.golden = golden
    state = scene.run()
    assert (state.phase, state.step) == (Phase.PAUSED, 0)
    told = golden.problem if golden else "the golden prompts are not answered yet"
    assert state.reason == f"neither pass nor fail in 3 intervals: golden_logprob: {told}"
    approve(scene.service)
    scene.tick()
    assert load_policy(scene.service).traffic_ratio == 0.5


def test_bad_golden_prompts_are_told_at_the_start(new_scene: NewScene) -> None:
    scene = new_scene()
    abort(scene.service, "")
    scene.tick()
    scene.service.golden_prompts.write_text('{"text": "a"}\n')
    with pytest.raises(OperationError, match=r"golden.jsonl, line 1: continuation: Field required"):
        start(scene.world.operation(), 2, PLAN)
