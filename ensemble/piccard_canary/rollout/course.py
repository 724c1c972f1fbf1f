"""The course of a rollout: its state, what may happen next, and what that makes of the state.

Nothing here acts. Who acts goes by `applied`: a move that changes traffic is written down first and done after, so that
whoever finds the state can do it again; only an abort takes the traffic away first.
"""

from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from piccard_canary.rollout.judgement import Counts, Judgement, Verdict
from piccard_canary.rollout.plan import Plan

KEPT_EVENTS = 200


class Phase(StrEnum):
    """Where a rollout is."""

    RUNNING = "running"
    WAITING = "waiting"
    PAUSED = "paused"
    ABORTING = "aborting"
    PROMOTING = "promoting"
    BAKING = "baking"
    ROLLING_BACK = "rolling_back"
    RETIRING = "retiring"
    PROMOTED = "promoted"
    ABORTED = "aborted"
    ROLLED_BACK = "rolled_back"


# Phases in which the canary is watched beside stable.
WATCHED = frozenset({Phase.RUNNING, Phase.WAITING, Phase.PAUSED})
ENDED = frozenset({Phase.PROMOTED, Phase.ABORTED, Phase.ROLLED_BACK})


class Move(StrEnum):
    """What a look leads to."""

    HOLD = "hold"
    NEXT = "next"
    WAIT = "wait"
    PAUSE = "pause"
    ABORT = "abort"
    PROMOTE = "promote"
    ROLL_BACK = "roll_back"
    FINISH = "finish"


class Event(BaseModel):
    """Something that happened; `at` is Unix time."""

    model_config = ConfigDict(extra="forbid")

    at: float
    what: str


class RolloutState(BaseModel):
    """rollout.json of a service.

    Attributes:
        generation: grows by one with every write.
        canary, stable: the versions; stable is what it was at the start.
        step: index into the plan's steps.
        applied: whether the ratio of this step is in policy.yaml.
        since: Unix time at which what is watched began: the step, or the bake time.
        passes: looks in a row that passed.
        past: what the finished steps left.
        reference: the last step in which stable had traffic.
        judgement: of the last look.
        reason: why it is in this phase.
        events: what happened, the newest last.
    """

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_version: Literal[1] = Field(default=1, alias="schema")
    generation: int = 0
    plan: Plan
    canary: int
    stable: int
    phase: Phase = Phase.RUNNING
    step: int = 0
    applied: bool = False
    started: float
    since: float
    passes: int = 0
    past: list[Counts] = Field(default_factory=list)
    reference: Counts | None = None
    judgement: Judgement | None = None
    reason: str = ""
    events: list[Event] = Field(default_factory=list)

    @property
    def ratio(self) -> float:
        """The canary's share of the traffic in this step."""
        return self.plan.steps[self.step]

    @property
    def last_step(self) -> bool:
        return self.step == len(self.plan.steps) - 1

    def note(self, now: float, what: str) -> None:
        """Add an event; the oldest ones go."""
        self.events = [*self.events[-KEPT_EVENTS + 1 :], Event(at=now, what=what)]


def next_move(state: RolloutState, judgement: Judgement, now: float) -> Move:
    """What a look leads to; `judgement.verdict` is of this look, `state` as it was before it."""
    if state.phase in WATCHED and judgement.verdict is Verdict.FAIL:
        return Move.ABORT
    if state.phase is Phase.BAKING:
        if judgement.verdict is Verdict.FAIL:
            return Move.ROLL_BACK
        return Move.FINISH if now - state.since >= state.plan.bake else Move.HOLD
    if state.phase is not Phase.RUNNING or now - state.since < state.plan.interval:
        return Move.HOLD
    if judgement.verdict is Verdict.PASS and state.passes + 1 >= state.plan.hysteresis:
        if state.last_step:
            return Move.PROMOTE
        return Move.WAIT if state.plan.steps[state.step + 1] in state.plan.gates else Move.NEXT
    late = now - state.since >= state.plan.hold * state.plan.interval
    return Move.PAUSE if late and judgement.verdict is Verdict.INCONCLUSIVE else Move.HOLD


def looked(state: RolloutState, judgement: Judgement) -> RolloutState:
    """The state after a look that moved nothing."""
    passes = state.passes + 1 if judgement.verdict is Verdict.PASS else 0
    return state.model_copy(update={"judgement": judgement, "passes": passes})


def moved(state: RolloutState, move: Move, judgement: Judgement, now: float) -> RolloutState:
    """The state that a move makes of `state`; what it does to the traffic is left to do."""
    after = looked(state, judgement)
    if move is Move.HOLD:
        return after
    if move is Move.NEXT:
        return next_step(after, now)
    phase, reason = {
        Move.WAIT: (Phase.WAITING, f"step {state.ratio:g} passed; `piccard rollout approve` begins the next"),
        Move.PAUSE: (Phase.PAUSED, f"neither pass nor fail in {state.plan.hold} intervals: {judgement.why}"),
        Move.ABORT: (Phase.ABORTING, judgement.why),
        Move.PROMOTE: (Phase.PROMOTING, f"passed at {state.ratio:g}"),
        Move.ROLL_BACK: (Phase.ROLLING_BACK, judgement.why),
        Move.FINISH: (Phase.RETIRING if state.plan.retire_old else Phase.PROMOTED, "nothing failed in the bake time"),
    }[move]
    return entered(after, phase, reason, now)


def entered(state: RolloutState, phase: Phase, reason: str, now: float) -> RolloutState:
    """The state in another phase."""
    after = state.model_copy(update={"phase": phase, "reason": reason, "passes": 0})
    after.note(now, f"{phase}: {reason}" if reason else str(phase))
    return after


def next_step(state: RolloutState, now: float) -> RolloutState:
    """The state at the beginning of the next step, whose ratio is yet to be set."""
    counts = state.judgement.counts if state.judgement is not None else Counts()
    shared = state.ratio < 1.0 and counts.stable_requests > 0
    after = state.model_copy(
        update={
            "phase": Phase.RUNNING,
            "step": state.step + 1,
            "applied": False,
            "since": now,
            "passes": 0,
            "past": [*state.past, counts],
            "reference": counts if shared else state.reference,
            "judgement": None,
            "reason": "",
        }
    )
    after.note(now, f"step {after.ratio:g}")
    return after


def baking(state: RolloutState, now: float) -> RolloutState:
    """The state after the promotion."""
    after = entered(state, Phase.BAKING, f"version {state.canary} is stable", now)
    return after.model_copy(update={"since": now, "judgement": None})


def judges_alone(state: RolloutState) -> bool:
    """Whether the canary has all traffic, so that stable's last counts stand for stable."""
    return state.phase is Phase.BAKING or state.ratio >= 1.0


def watched_anew(state: RolloutState, now: float) -> RolloutState:
    """The state whose watch begins now; the evidence of a step so far counts on."""
    counts = [] if state.judgement is None or judges_alone(state) else [state.judgement.counts]
    return state.model_copy(update={"since": now, "passes": 0, "past": [*state.past, *counts], "judgement": None})


def begin_again(state: RolloutState, now: float) -> RolloutState:
    """The state in which the same step is watched anew, its ratio set again."""
    return watched_anew(entered(state, Phase.RUNNING, "", now), now).model_copy(update={"applied": False})
