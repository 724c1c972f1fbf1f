"""Loads a version into a running server and keeps its state true."""

from collections.abc import Callable
from pathlib import Path

from piccard_contract.home import Service, version_owner
from piccard_contract.lifecycle import IllegalMoveError, ServiceState, VersionState
from piccard_contract.process_lock import is_held

from piccard.containment import check_version_folder
from piccard.errors import OperationError
from piccard.places import places
from piccard.probe import probe_version
from piccard.state_store import StateStore, control_lock
from piccard.triton_control import TritonControl

# Seconds for each golden prompt.
PROBE_TIMEOUT = 120.0

Tell = Callable[[str], None]


class _NotToBeLoadedError(OperationError):
    """Somebody else loaded or retired the version meanwhile, so it is not to be marked failed."""


def load_version(control: TritonControl, service: Service, version: int, tell: Tell) -> None:
    """Load `version` beside those that run, probe it, and give it its role: staged -> loading -> probing -> ready.

    Raises:
        OperationError: it cannot be loaded or fails its probe; it is marked failed with the reason, and what ran
            before still does. Where the server itself ended, its next start goes on with it.
    """
    store = StateStore(service)
    try:
        found = _begin(store, version)
        tell(f"loading version {version}")
        check_version_folder(service, version)
        if found is VersionState.FAILED:
            _drop_dead(control, service, version)
        add_version(control, service, version)
        move(store, version, VersionState.PROBING)
        tell(f"probing version {version}")
        probe_version(control.address, service, version, PROBE_TIMEOUT)
        _succeed(store, version)
    except _NotToBeLoadedError:
        raise
    except (OperationError, OSError) as error:
        if not control.live():
            raise
        try:
            # The state first: with it no request goes there.
            move(store, version, VersionState.FAILED, str(error))
        finally:
            drop_failed(control, service, version)
        raise


def add_version(control: TritonControl, service: Service, version: int) -> None:
    """Have the server load `version` beside those it has."""
    with control_lock(service, service.llm):
        control.set_versions(service, service.llm, {*control.ready_versions(service.llm), version})


def drop_version(control: TritonControl, service: Service, version: int) -> None:
    """Have the server let go of `version`: new requests do not reach it, its streams finish.

    The last version of a model cannot be dropped by an override, so then the model is unloaded.
    """
    with control_lock(service, service.llm):
        rest = set(control.ready_versions(service.llm)) - {version}
        if rest:
            control.set_versions(service, service.llm, rest)
        else:
            control.unload(service.llm)


def drop_failed(control: TritonControl, service: Service, version: int) -> None:
    """Drop a version that failed, where the server has it at all."""
    if version in control.ready_versions(service.llm):
        drop_version(control, service, version)


def revive_version(control: TritonControl, service: Service, version: int) -> None:
    """Start a version again whose process died: loading the same set again would not.

    Beside another version it is dropped and added; the only one is unloaded and loaded.

    Raises:
        OperationError: it cannot be loaded.
    """
    with control_lock(service, service.llm):
        # Somebody else may have done it while this waited for the lock.
        if is_held(service.process_lock(version_owner(version))):
            return
        rest = _unload_dead(control, service, version)
        control.set_versions(service, service.llm, {*rest, version})


def _drop_dead(control: TritonControl, service: Service, version: int) -> None:
    """Have the server let go of a version that died again and again: to load the same set would not start it."""
    with control_lock(service, service.llm):
        if not is_held(service.process_lock(version_owner(version))):
            _unload_dead(control, service, version)


def _unload_dead(control: TritonControl, service: Service, version: int) -> set[int]:
    """Unload a version whose process is dead; returns the versions beside it."""
    ready = set(control.ready_versions(service.llm))
    rest = ready - {version}
    if rest:
        # Newer servers do not call a dead version ready and have it loaded all the same; where they have not, naming
        # the rest changes nothing.
        control.set_versions(service, service.llm, rest)
    elif version in ready:
        control.unload(service.llm)
        control.wait_unloaded(service.llm, timeout=10.0)
    return rest


def roll(control: TritonControl, service: Service, model: str, *, dead: int | None = None) -> int:
    """Start admission or a router again under its other number, without a gap; returns that number.

    Args:
        dead: the folder whose process died; None rolls away from the one that serves.
    """
    with control_lock(service, model):
        ready = set(control.ready_versions(model))
        if dead is not None and ready and dead not in ready:
            # Somebody else rolled it while this waited for the lock.
            return max(ready)
        current = dead or max(ready, default=2)
        other = 1 if current == 2 else 2
        if other not in ready:
            control.set_versions(service, model, {current, other})
        elif not is_held(_step_lock(service, model, other)):
            # Both are loaded, since an earlier roll was cut short, and neither lives.
            control.set_versions(service, model, {current})
            control.set_versions(service, model, {current, other})
        control.set_versions(service, model, {other})
        return other


def _step_lock(service: Service, model: str, folder: int) -> Path:
    return next(place for place in places(service, ()) if place.model == model).lock(folder)


def move(store: StateStore, version: int, to: VersionState, reason: str = "") -> None:
    """Move a version in state.json.

    Raises:
        OperationError: it may not move there from where it is.
    """
    with store.change() as state:
        try:
            state.move(version, to, reason)
        except IllegalMoveError as error:
            raise OperationError(str(error)) from error


def forget(store: StateStore, version: int) -> None:
    """Take a version off the list that never came to be; its number is not used again."""
    with store.change() as state:
        state.versions.pop(version, None)


def _begin(store: StateStore, version: int) -> VersionState:
    """Note that the version is being loaded; returns the state that it was in."""
    with store.change() as state:
        found = state.versions[version].state
        if found is VersionState.PROBING:
            # Whoever probed it was interrupted.
            state.move(version, VersionState.FAILED)
        try:
            state.move(version, VersionState.LOADING)
        except IllegalMoveError as error:
            raise _NotToBeLoadedError(str(error)) from error
    return found


def _succeed(store: StateStore, version: int) -> None:
    with store.change() as state:
        state.move(version, VersionState.READY)
        take_role(state, version)


def take_role(state: ServiceState, version: int) -> None:
    """Give a version that became ready the role that the state names for it."""
    role = role_of(state, version)
    if role is not None:
        state.move(version, role)


def role_of(state: ServiceState, version: int) -> VersionState | None:
    """stable, canary or previous, as the state names it; None for a version without a role."""
    roles = {
        state.stable: VersionState.STABLE,
        state.canary: VersionState.CANARY,
        state.previous: VersionState.PREVIOUS,
    }
    return roles.get(version)
