"""`piccard retire N`: a version ends after its last request."""

import time
from datetime import UTC, datetime, timedelta

from piccard_contract.home import version_owner
from piccard_contract.lifecycle import ServiceState, VersionState
from piccard_contract.process_lock import is_held

from piccard.errors import OperationError
from piccard.operation import Operation, record_of
from piccard.outcome import Outcome
from piccard.repository import stable_target
from piccard.retention import forget_retired
from piccard.version_loading import drop_version, move

# How long a version stays loaded after another was promoted, so that a rollback is a rename.
BAKE_TIME = timedelta(hours=24)


def retire(op: Operation, version: int, *, force: bool, wait: float) -> Outcome:
    """Let `version` finish its streams and unload it; its folder stays until newer ones are retired.

    Args:
        force: retire the previous version within its bake time too.
        wait: seconds to wait for its streams; whatever is not over then, the server goes on draining.

    Raises:
        OperationError: it is stable or the canary, or previous and still baking.
    """
    what = f"retire {version}"
    state = op.store.read()
    found = record_of(state, version)
    if found is VersionState.RETIRED:
        return Outcome(what, op.service.name, False, f"version {version} is retired already", op.dry_run)
    _check(state, version, force=force)
    if stable_target(op.service) == version:
        raise OperationError(
            f"requests still go to version {version}: a promotion was interrupted; run `piccard doctor --repair`"
        )
    before, after = {"version": version, "state": found.value}, {"version": version, "state": "retired"}
    if op.dry_run:
        return Outcome(what, op.service.name, True, f"version {version} is retired", True, before, after)
    with op.recorded(what, before, after) as steps:
        steps.do(lambda: _drain(op, version), undo=lambda: _restore(op, state, version))
        loaded = op.control is not None and version in op.control.ready_versions(op.service.llm)
        if op.control is not None and loaded:
            control = op.control
            steps.do(lambda: drop_version(control, op.service, version), undo=lambda: None)
    message = f"version {version} is retired"
    if not _finish(op, version, wait):
        message = f"version {version} takes no new requests and is retired when its streams are over"
    forget_retired(op)
    return Outcome(what, op.service.name, True, message, False, before, after)


def _check(state: ServiceState, version: int, *, force: bool) -> None:
    if version == state.stable:
        raise OperationError(f"version {version} is stable; promote another first")
    if version == state.canary:
        raise OperationError(f"version {version} is the canary; run `piccard canary off` first")
    if version == state.previous and not force:
        time_now = datetime.now(UTC)
        since = datetime.fromisoformat(state.previous_since) if state.previous_since else time_now
        if since > time_now:
            raise OperationError(
                f"the clock was set back: version {version} became previous at {since:%Y-%m-%d %H:%M} UTC, which is "
                "yet to come; `piccard doctor --repair` counts its bake time from now, or retire it with --force"
            )
        until = since + BAKE_TIME
        if time_now < until:
            raise OperationError(
                f"version {version} is what `piccard rollback` returns to until {until:%Y-%m-%d %H:%M} UTC; "
                "wait, or retire it with --force"
            )


def _drain(op: Operation, version: int) -> None:
    with op.store.change() as state:
        if state.previous == version:
            state.previous, state.previous_since = None, None
        record = state.versions[version]
        if record.state is VersionState.PREVIOUS:
            state.move(version, VersionState.READY)
        if record.state in (VersionState.READY, VersionState.FAILED):
            state.move(version, VersionState.DRAINING)
        elif record.state is VersionState.STAGED:
            state.move(version, VersionState.RETIRED)
        elif record.state is not VersionState.DRAINING:
            raise OperationError(
                f"version {version} is {record.state}; wait for its load to end, then retire it; where its command was "
                "ended, run `piccard doctor --repair` first"
            )


def _finish(op: Operation, version: int, wait: float) -> bool:
    """Whether the version's process ended within `wait` seconds, so that it is retired."""
    deadline = time.monotonic() + wait
    while is_held(op.service.process_lock(version_owner(version))):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    if op.store.read().versions[version].state is VersionState.DRAINING:
        move(op.store, version, VersionState.RETIRED)
    return True


def _restore(op: Operation, before: ServiceState, version: int) -> None:
    with op.store.change() as state:
        state.previous, state.previous_since = before.previous, before.previous_since
        state.versions[version] = before.versions[version]
