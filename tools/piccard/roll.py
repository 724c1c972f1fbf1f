"""`piccard roll`: admission and routers go over to the installed code, each by its other folder, while requests run."""

from __future__ import annotations

import time
from collections.abc import Sequence

from piccard_contract.live_state import Section
from piccard_contract.process_lock import is_held

from piccard.drift import code_of, installed_ensemble_hash, short
from piccard.errors import OperationError
from piccard.operation import Operation, sections_of
from piccard.outcome import Outcome
from piccard.places import Place, places
from piccard.state_store import control_lock
from piccard.triton_control import TritonControl
from piccard.version_loading import roll as roll_over

# Routers first: a newer router reads what an older admission writes, and not always the other way round.
ORDER = ("router", "router_unary", "admission")

# Seconds for a new process to tell what it runs; it does so while it is loaded.
_REPORT = 30.0


def roll(op: Operation, names: Sequence[str], *, wait: float) -> Outcome:
    """Start admission and routers anew from their other folders; requests in flight end where they are.

    Args:
        names: which of `ORDER`, whatever they run; none takes those that run other code than is installed.
        wait: seconds to wait for the last requests of a process that was rolled away from before.

    Raises:
        OperationError: no such process, no server runs, its twin still has requests, or the new one cannot be
            started; those that were rolled before stay so, and the others serve on.
    """
    unknown = sorted(set(names) - set(ORDER))
    if unknown:
        raise OperationError(f"there is no {unknown[0]} to roll; there are: {', '.join(ORDER)}", exit_code=2)
    if op.control is None:
        raise OperationError("no server runs; the next `piccard serve` runs the installed code")
    found = {place.name: place for place in places(op.service, ())}
    chosen = [found[name] for name in ORDER if name in names or (not names and _due(op, op.control, found[name]))]
    what = f"roll {', '.join(names) or 'what differs'}"
    installed = short(installed_ensemble_hash())
    if not chosen:
        return Outcome(what, op.service.name, False, f"all run the installed code {installed}", op.dry_run)
    told = f"{', '.join(place.name for place in chosen)} run the installed code {installed}"
    before = {place.name: _serving(op, op.control, place) for place in chosen}
    if op.dry_run:
        return Outcome(what, op.service.name, True, told, op.dry_run, before)
    with op.recorded(what, before, {"code": installed}):
        for place in chosen:
            _roll(op, op.control, place, wait)
    after = {place.name: _serving(op, op.control, place) for place in chosen}
    return Outcome(what, op.service.name, True, told, op.dry_run, before, after)


def _roll(op: Operation, control: TritonControl, place: Place, wait: float) -> None:
    if _unfinished(control, place):
        op.tell(f"finishing a roll of {place.name} that was cut short")
        with control_lock(op.service, place.model):
            control.set_versions(op.service, place.model, {_folder(control, place)})
        if not _differs(op, control, place):
            return
    twins = set(dict(place.owners)) - {_folder(control, place)}
    deadline = time.monotonic() + wait
    while busy := [number for number in twins if is_held(place.lock(number))]:
        # The server cannot load a folder whose last process is still there.
        if time.monotonic() >= deadline:
            raise OperationError(
                f"{place.name} was rolled before, and its process of folder {busy[0]} has requests yet; "
                "try again when they are over, or give --wait"
            )
        time.sleep(0.1)
    op.tell(f"rolling {place.name}")
    folder = roll_over(control, op.service, place.model)
    _await_report(op, place, folder)


def _await_report(op: Operation, place: Place, folder: int) -> None:
    deadline = time.monotonic() + _REPORT
    while not code_of(_section(op, place, folder)):
        if time.monotonic() >= deadline:
            raise OperationError(f"{place.name} was rolled to folder {folder}, and its process tells nothing of itself")
        time.sleep(0.05)


def _due(op: Operation, control: TritonControl, place: Place) -> bool:
    return _unfinished(control, place) or _differs(op, control, place)


def _unfinished(control: TritonControl, place: Place) -> bool:
    """Whether both folders are loaded; new requests go to the higher one already."""
    return len(control.ready_versions(place.model)) > 1


def _differs(op: Operation, control: TritonControl, place: Place) -> bool:
    """Whether a process runs other code than is installed; one that tells nothing is too old to."""
    return code_of(_section(op, place, _folder(control, place))) != installed_ensemble_hash()


def _serving(op: Operation, control: TritonControl, place: Place) -> dict[str, object]:
    folder = _folder(control, place)
    return {"folder": folder, "code": short(code_of(_section(op, place, folder)))}


def _folder(control: TritonControl, place: Place) -> int:
    """The folder that new requests go to: the highest that is loaded."""
    return max(control.ready_versions(place.model), default=1)


def _section(op: Operation, place: Place, folder: int) -> Section | None:
    return sections_of(op.service).get(dict(place.owners)[folder])
