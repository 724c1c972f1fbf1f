"""What a home keeps of retired versions: all of those retired last, nothing of older ones."""

import shutil

from piccard_contract.home import version_owner
from piccard_contract.lifecycle import KEPT_RETIRED, ServiceState, VersionState
from piccard_contract.live_state import LiveState
from piccard_contract.process_lock import is_held

from piccard.exports import remove_unused
from piccard.operation import Operation
from piccard.repository import stable_target
from piccard.version_loading import forget


def forget_retired(op: Operation) -> list[int]:
    """Forget all retired versions but the newest, with folder, lock, section and line of state.json.

    The routers and the exporter drop a version's metrics once state.json no longer names it. The folder goes first:
    when the command is ended half way, the version is still known, and the next command goes on with it.

    Returns:
        their numbers.
    """
    forgotten = []
    for version in _too_old(op, op.store.read()):
        try:
            with op.recorded(f"forget {version}", {"version": version, "state": "retired"}, {}):
                _forget(op, version)
        except OSError as error:
            op.tell(f"version {version} was retired long ago and is not removed: {error}")
            break
        forgotten.append(version)
    return forgotten


def _too_old(op: Operation, state: ServiceState) -> list[int]:
    retired = sorted(
        number
        for number, record in state.versions.items()
        if record.state is VersionState.RETIRED and not is_held(op.service.process_lock(version_owner(number)))
    )
    return [number for number in retired[:-KEPT_RETIRED] if number != stable_target(op.service)]


def _forget(op: Operation, version: int) -> None:
    service = op.service
    folder = service.version_folder(version)
    if folder.exists():
        shutil.rmtree(folder)
    owner = version_owner(version)
    live = LiveState(service.live_state, service.run_folder)
    try:
        live.clear(owner)
    finally:
        live.close()
    service.process_lock(owner).unlink(missing_ok=True)
    service.operators_file(version).unlink(missing_ok=True)
    remove_unused(service.home)
    forget(op.store, version)
