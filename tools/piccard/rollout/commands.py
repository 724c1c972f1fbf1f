"""`piccard rollout start|status|pause|resume|abort|approve`: what a person says to a rollout."""

import time
from collections.abc import Callable
from typing import Any

from piccard_canary.rollout.course import ENDED, WATCHED, Phase, RolloutState, begin_again, entered, next_step
from piccard_canary.rollout.plan import Plan
from piccard_contract.home import Service
from piccard_contract.lifecycle import VersionState
from piccard_contract.process_lock import holder_pid

from piccard.audit import write_audit
from piccard.errors import OperationError
from piccard.operation import Operation, check_serves, record_of
from piccard.outcome import Outcome
from piccard.rollout.controller import OWNER
from piccard.rollout.golden_prompts import golden_prompts
from piccard.rollout.store import RolloutStore
from piccard.rollout.traffic import take_away

Change = Callable[[RolloutState, float], RolloutState]

# Events that `status` shows.
_SHOWN = 10


def start(op: Operation, version: int, plan: Plan) -> Outcome:
    """Begin a rollout of `version`.

    Raises:
        OperationError: another one is under way, the version cannot be a canary, or the service's golden prompts are
            none.
    """
    what = f"rollout start {version}"
    store = RolloutStore(op.service)
    found = store.read()
    if found is not None and found.phase not in ENDED:
        raise OperationError(f"a rollout of version {found.canary} is {found.phase}; {_end_of(found)}")
    state = op.store.read()
    record = record_of(state, version)
    if state.stable is None:
        raise OperationError("there is no stable version to compare with; promote one")
    if version == state.stable:
        raise OperationError(f"version {version} is stable already")
    if record not in (VersionState.READY, VersionState.CANARY, VersionState.PREVIOUS):
        raise OperationError(f"version {version} is {record}; a canary has to be loaded and probed")
    check_serves(op, version)
    golden_prompts(op.service)
    now = time.time()
    begun = RolloutState(plan=plan, canary=version, stable=state.stable, started=now, since=now)
    begun.note(now, f"started beside version {state.stable}")
    message = f"the rollout of version {version} begins at {100 * plan.steps[0]:g} %"
    if runner(op.service) is None:
        message += "; nobody runs it yet: `piccard serve` does, or `piccard rollout run`"
    after = {"canary": version, "stable": state.stable, "steps": plan.steps}
    if not op.dry_run:
        with store.locked():
            store.write(begun if found is None else begun.model_copy(update={"generation": found.generation}))
        write_audit(op.service, what, {}, after)
    return Outcome(what, op.service.name, True, message, op.dry_run, {}, after)


def pause(service: Service) -> Outcome:
    """Begin no further step; the canary keeps its share, and is aborted still if it fails."""

    def change(state: RolloutState, now: float) -> RolloutState:
        if state.phase is Phase.PAUSED:
            return state
        _must_be(state, Phase.RUNNING, Phase.WAITING)
        return entered(state, Phase.PAUSED, "paused by a person", now)

    return _change(service, "pause", change, "it waits at {ratio:g}; `piccard rollout resume` goes on")


def resume(service: Service) -> Outcome:
    """Watch the step in which it was paused anew."""

    def change(state: RolloutState, now: float) -> RolloutState:
        if state.phase is Phase.RUNNING:
            return state
        _must_be(state, Phase.PAUSED)
        return begin_again(state, now)

    return _change(service, "resume", change, "step {ratio:g} is watched anew")


def approve(service: Service) -> Outcome:
    """Begin the next step of a rollout that waits at a gate, or that could not be judged."""

    def change(state: RolloutState, now: float) -> RolloutState:
        _must_be(state, Phase.WAITING, Phase.PAUSED)
        if state.last_step:
            return entered(state, Phase.PROMOTING, "approved by a person", now)
        return next_step(state, now)

    return _change(service, "approve", change, "it goes on to {ratio:g}")


def abort(service: Service, reason: str) -> Outcome:
    """Take the canary's traffic away at once and end the rollout."""

    def change(state: RolloutState, now: float) -> RolloutState:
        if state.phase is Phase.ABORTING:
            return state
        _must_be(state, Phase.RUNNING, Phase.WAITING, Phase.PAUSED)
        take_away(service, state.canary)
        return entered(state, Phase.ABORTING, reason, now)

    return _change(service, "abort", change, "version {canary} gets no traffic any more")


def status(service: Service) -> dict[str, Any]:
    """The rollout that is under way, or the last; empty where there never was one."""
    state = RolloutStore(service).read()
    if state is None:
        return {}
    told = state.model_dump(mode="json", by_alias=True, exclude={"past", "reference", "events"})
    told["ratio"] = state.ratio
    told["events"] = [event.model_dump() for event in state.events[-_SHOWN:]]
    told["controller"] = runner(service)
    return told


def runner(service: Service) -> int | None:
    """The process that runs the service's rollouts; None where none does."""
    return holder_pid(service.process_lock(OWNER))


def _end_of(state: RolloutState) -> str:
    """What ends a rollout that is under way."""
    if state.phase in WATCHED:
        return "`piccard rollout abort` ends it"
    if state.phase is Phase.BAKING:
        return f"it ends by itself after {state.plan.bake:g} s, or by `piccard rollback`"
    return "it ends by itself, and `piccard rollout status` tells what it does"


def _must_be(state: RolloutState, *phases: Phase) -> None:
    if state.phase not in phases:
        raise OperationError(f"the rollout is {state.phase}; this is for one that is {' or '.join(phases)}")


def _change(service: Service, what: str, change: Change, message: str) -> Outcome:
    store = RolloutStore(service)
    with store.locked():
        before = store.under_way()
        after = change(before, time.time())
        if after is not before:
            store.write(after)
    told = message.format(ratio=after.ratio, canary=after.canary)
    changed = after is not before
    was, now = {"phase": before.phase.value}, {"phase": after.phase.value, "ratio": after.ratio}
    if changed:
        write_audit(service, f"rollout {what}", was, now)
    return Outcome(f"rollout {what}", service.name, changed, told, False, was, now)
