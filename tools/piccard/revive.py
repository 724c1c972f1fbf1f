"""`piccard revive`: starts dead processes again that were given up, or that no supervisor looks after."""

from __future__ import annotations

from piccard_contract.lifecycle import SERVING_STATES, VersionState
from piccard_contract.process_lock import is_held

from piccard.errors import OperationError
from piccard.operation import Operation
from piccard.outcome import Outcome
from piccard.places import Place, places
from piccard.state_store import StateStore
from piccard.triton_control import TritonControl
from piccard.version_loading import load_version, revive_version, roll


def revive(op: Operation, name: str | None) -> Outcome:
    """Start a dead process again, or all of them; whoever gave it up counts anew once it lives.

    A version that failed is loaded and probed, and gets its role back.

    Args:
        name: version-N, admission, router or router_unary; None takes all that are dead, and canary and previous
            where they failed.

    Raises:
        OperationError: there is no such process, no server runs, or it cannot be started.
    """
    control = _control(op)
    chosen = [place for place in candidates(op) if place.name == name or (name is None and is_due(op, place))]
    if name is not None and not chosen:
        there = ", ".join(place.name for place in candidates(op))
        raise OperationError(f"{op.service.name} has no process {name} that may run; there are: {there}")
    dead = [place for place in chosen if is_due(op, place) or _failed(op, place)]
    names = ", ".join(place.name for place in dead)
    what = f"revive {name or 'what is dead'}"
    if not dead:
        return Outcome(what, op.service.name, False, f"{name or 'everything'} is alive", op.dry_run)
    if not op.dry_run:
        with op.recorded(what, {"dead": [place.name for place in dead]}, {}):
            for place in dead:
                op.tell(f"starting {place.name}")
                start_again(op, control, place)
    return Outcome(what, op.service.name, True, f"{names}: started again", op.dry_run)


def candidates(op: Operation) -> list[Place]:
    """What may have a process: admission, routers, and versions that serve or failed."""
    state = op.store.read()
    failed = [number for number, record in state.versions.items() if record.state is VersionState.FAILED]
    return places(op.service, {*state.loaded(), *failed})


def is_due(op: Operation, place: Place) -> bool:
    """Whether a process is dead that should live. A failed version should where it has a role."""
    if not place.is_version:
        return _dead_folder(_control(op), place) is not None
    state, number = op.store.read(), place.number
    serving = state.versions[number].state in SERVING_STATES
    has_role = number in (state.stable, state.canary, state.previous)
    return (serving and not is_held(place.lock(number))) or (_failed(op, place) and has_role)


def start_again(op: Operation, control: TritonControl, place: Place) -> None:
    """Start the process of `place`, which is dead.

    Raises:
        OperationError: it cannot be started.
    """
    if not place.is_version:
        roll(control, op.service, place.model, dead=_dead_folder(control, place))
    elif _failed(op, place):
        load_version(control, op.service, place.number, op.tell)
    else:
        revive_version(control, op.service, place.number)


def _dead_folder(control: TritonControl, place: Place) -> int | None:
    return place.dead_folder(control.ready_versions(place.model))


def _failed(op: Operation, place: Place) -> bool:
    return place.is_version and StateStore(op.service).read().versions[place.number].state is VersionState.FAILED


def _control(op: Operation) -> TritonControl:
    if op.control is None:
        raise OperationError("no server runs; `piccard serve` starts one, with every version that may serve")
    return op.control
