"""The course of a rollout, look by look."""

import pytest
from piccard_canary.rollout.course import (
    KEPT_EVENTS,
    Move,
    Phase,
    RolloutState,
    baking,
    begin_again,
    entered,
    judges_alone,
    moved,
    next_move,
    next_step,
)
from piccard_canary.rollout.judgement import Counts, Judgement, Verdict
from piccard_canary.rollout.plan import Plan

PLAN = Plan(steps=[0.05, 0.5, 1.0], interval=100.0, look=10.0, hold=3, gates=[1.0], bake=50.0)


def state(**values: object) -> RolloutState:
    return RolloutState(plan=PLAN, canary=2, stable=1, started=0.0, since=0.0, applied=True).model_copy(update=values)


def saying(verdict: Verdict, requests: int = 10) -> Judgement:
    return Judgement(verdict=verdict, why="so it is", counts=Counts(canary_requests=requests, stable_requests=requests))


PASS, FAIL, OPEN = (saying(verdict) for verdict in (Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE))


def test_it_takes_the_interval_and_two_passes() -> None:
    assert next_move(state(passes=5), PASS, 99.0) is Move.HOLD
    assert next_move(state(passes=0), PASS, 100.0) is Move.HOLD
    assert next_move(state(passes=1), PASS, 100.0) is Move.NEXT
    # A look that does not pass begins the count anew.
    assert moved(state(passes=1), Move.HOLD, OPEN, 50.0).passes == 0
    assert moved(state(passes=1), Move.HOLD, PASS, 50.0).passes == 2


def test_gates_and_the_end() -> None:
    assert next_move(state(step=1, passes=1), PASS, 100.0) is Move.WAIT
    assert next_move(state(step=2, passes=1), PASS, 100.0) is Move.PROMOTE


@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.WAITING, Phase.PAUSED])
def test_a_failure_aborts_at_once_wherever_the_canary_has_traffic(phase: Phase) -> None:
    assert next_move(state(phase=phase), FAIL, 1.0) is Move.ABORT


def test_what_cannot_be_judged_waits_for_a_person() -> None:
    assert next_move(state(), OPEN, 299.0) is Move.HOLD
    assert next_move(state(), OPEN, 300.0) is Move.PAUSE
    paused = moved(state(), Move.PAUSE, OPEN, 300.0)
    assert paused.phase is Phase.PAUSED
    assert paused.reason == "neither pass nor fail in 3 intervals: so it is"
    assert next_move(paused, PASS, 1000.0) is Move.HOLD


def test_a_step_leaves_its_counts() -> None:
    first = moved(state(passes=1), Move.NEXT, PASS, 100.0)
    assert (first.step, first.ratio, first.applied, first.since, first.passes) == (1, 0.5, False, 100.0, 0)
    assert first.past == [PASS.counts]
    assert first.reference == PASS.counts
    # At all traffic stable has none: the counts of the step before stand for it.
    alone = saying(Verdict.PASS, 99)
    last = next_step(first.model_copy(update={"judgement": alone}), 200.0)
    assert judges_alone(last)
    assert last.reference == alone.counts
    assert next_step(state(step=1, judgement=saying(Verdict.PASS, 0)), 1.0).reference is None


def test_baking_ends_or_is_rolled_back() -> None:
    after = baking(moved(state(step=2), Move.PROMOTE, PASS, 10.0), 20.0)
    assert (after.phase, after.since) == (Phase.BAKING, 20.0)
    assert next_move(after, OPEN, 69.0) is Move.HOLD
    assert next_move(after, OPEN, 70.0) is Move.FINISH
    assert next_move(after, FAIL, 21.0) is Move.ROLL_BACK
    assert moved(after, Move.FINISH, PASS, 70.0).phase is Phase.PROMOTED
    retiring = state(plan=PLAN.model_copy(update={"retire_old": True}), phase=Phase.BAKING)
    assert moved(retiring, Move.FINISH, PASS, 70.0).phase is Phase.RETIRING


def test_to_go_on_keeps_the_evidence() -> None:
    paused = entered(state(judgement=OPEN, passes=1), Phase.PAUSED, "by a person", 10.0)
    again = begin_again(paused, 20.0)
    assert (again.phase, again.since, again.applied, again.judgement) == (Phase.RUNNING, 20.0, False, None)
    assert again.past == [OPEN.counts]


def test_events_do_not_grow_for_ever() -> None:
    busy = state()
    for number in range(KEPT_EVENTS + 50):
        busy.note(number, f"event {number}")
    assert len(busy.events) == KEPT_EVENTS
    assert busy.events[-1].what == f"event {KEPT_EVENTS + 49}"


def test_it_survives_the_file() -> None:
    there = moved(state(passes=1), Move.NEXT, PASS, 100.0)
    assert RolloutState.model_validate_json(there.model_dump_json(by_alias=True)) == there
