"""`piccard publish CHECKPOINT`: a new version is staged, loaded beside the others and probed."""

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from piccard_contract.home import DEFAULT_SERVICE
from piccard_contract.lifecycle import UNPROVEN_STATES, ServiceState, VersionRecord, VersionState, now
from piccard_contract.validation import explain
from piccard_contract.version_file import LABEL, Hashes, Runner, VersionFile, VersionFileError, read_version_file
from pydantic import ValidationError

from piccard.checkpoint_folder import check_checkpoint, recorded_path
from piccard.durable_file import sync_folder
from piccard.errors import OperationError
from piccard.exports import remove_unused, with_export
from piccard.home_init import make_service, remove_service
from piccard.operation import Operation
from piccard.outcome import Outcome
from piccard.repository import compile_file, write_version
from piccard.snapshot import checkpoint_hashes, copy_code, installed_code_hash
from piccard.triton_control import TritonControl
from piccard.version_loading import forget, load_version

CODE_WARNING = "a version is code: its engine, checkpoint and chat template run in the server; publish what you trust"

_LIVE = frozenset(VersionState) - {VersionState.FAILED, VersionState.RETIRED, VersionState.DRAINING}


@dataclass(frozen=True, slots=True)
class Publication:
    """What the command line says about a new version.

    Attributes:
        settings: keys of version.yaml beside label, checkpoint and hashes; those left out take the default.
        hash_weights: whether to read all weights for their hash.
        int4: whether the export of runner onnxruntime has its products and experts packed in four bits.
    """

    checkpoint: Path
    label: str | None
    settings: dict[str, Any]
    hash_weights: bool = True
    int4: bool = False


def publish(op: Operation, publication: Publication) -> Outcome:
    """Publish a version; with a running server it is loaded and probed, without one it is staged for the next start.

    Published again, the same checkpoint with the same settings is the version that is there; one that failed is tried
    again. A service that is not there yet is made, with the new version as its stable one.

    Raises:
        OperationError: the checkpoint or a setting is wrong, and nothing changed; or the version cannot be loaded or
            fails its probe, and it is marked failed.
    """
    version = _version_file(op, publication)
    try:
        if not op.dry_run:
            version = with_export(op.service, version, publication.checkpoint, op.tell, int4=publication.int4)
        return _publish(op, publication, version)
    except BaseException:
        remove_unused(op.service.home)
        raise


def _publish(op: Operation, publication: Publication, version: VersionFile) -> Outcome:
    if not op.store.exists:
        return _publish_service(op, version)
    state = _without_interrupted(op)
    same = _same(op, state, version, publication.label)
    if same is not None:
        return _again(op, state, same)
    taken = [number for number, record in state.versions.items() if record.label == version.label]
    if taken:
        raise OperationError(
            f"label {version.label} is that of version {taken[0]}, which differs; choose another --label"
        )
    number = state.next_version
    what = f"publish {version.label} as {number}"
    outcome = _outcome(op, what, number, version)
    op.tell(CODE_WARNING)
    if op.dry_run:
        return outcome
    with op.recorded(what, {}, outcome.after) as steps:
        staged = op.service.staging / str(number)
        steps.do(lambda: _stage(staged, version), undo=lambda: shutil.rmtree(staged, ignore_errors=True))
        steps.do(lambda: _record(op, number, version.label), undo=lambda: forget(op.store, number))
        final = op.service.version_folder(number)
        steps.do(lambda: _install(staged, final), undo=lambda: shutil.rmtree(final, ignore_errors=True))
    return _load(op, number, outcome)


def _without_interrupted(op: Operation) -> ServiceState:
    """The state without publications that ended before their folder was there; this command holds the lock."""
    state = op.store.read()
    for number, record in list(state.versions.items()):
        if record.state is VersionState.STAGED and not op.service.version_folder(number).is_dir():
            del state.versions[number]
            if not op.dry_run:
                forget(op.store, number)
    return state


def _version_file(op: Operation, publication: Publication) -> VersionFile:
    runner = publication.settings.get("runner", Runner.TORCH)
    scripted = runner == Runner.SCRIPTED
    if not scripted:
        check_checkpoint(publication.checkpoint)
    if publication.label is not None and not re.fullmatch(LABEL, publication.label):
        raise OperationError(
            "--label takes one line of up to 64 letters, digits and . _ + -, such as v1.2.0", exit_code=2
        )
    name = str(publication.checkpoint) if scripted else recorded_path(publication.checkpoint, op.service)
    number = op.store.read().next_version if op.store.exists else 1
    try:
        version = VersionFile.model_validate(
            {"label": publication.label or f"version-{number}", "checkpoint": name, **publication.settings}
        )
    except ValidationError as error:
        raise OperationError(explain(error), exit_code=2) from error
    for option, given in (("--ops-library", version.ops_library), ("--quantize", publication.int4)):
        if given and version.runner is not Runner.ONNXRUNTIME:
            raise OperationError(f"{option} is for --runner onnxruntime", exit_code=2)
    return version.model_copy(update={"hashes": _hashes(publication, scripted=scripted)})


def _hashes(publication: Publication, *, scripted: bool) -> Hashes:
    parts = Hashes() if scripted else checkpoint_hashes(publication.checkpoint, weights=publication.hash_weights)
    # A linked version's says what it was published with; what it runs is whatever is installed.
    return parts.model_copy(update={"code": installed_code_hash()})


def _same(op: Operation, state: ServiceState, version: VersionFile, label: str | None) -> int | None:
    """The version that is the same as `version`, whatever its label where none was asked for."""
    for number, record in sorted(state.versions.items(), reverse=True):
        if record.state in (VersionState.RETIRED, VersionState.DRAINING):
            continue
        try:
            found = read_version_file(op.service.version_folder(number))
        except (OSError, VersionFileError):
            continue
        wanted = version if label is not None else version.model_copy(update={"label": found.label})
        if _but_linked_code(found) == _but_linked_code(wanted):
            return number
    return None


def _but_linked_code(version: VersionFile) -> VersionFile:
    """A linked version is the same whatever code is installed."""
    if not version.linked:
        return version
    return version.model_copy(update={"hashes": version.hashes.model_copy(update={"code": None})})


def _again(op: Operation, state: ServiceState, number: int) -> Outcome:
    record = state.versions[number]
    what = f"publish {record.label} as {number}"
    # This command holds the operators' lock, so whoever loaded it before was interrupted.
    waits = record.state in UNPROVEN_STATES and op.control is not None
    if record.state in _LIVE and not waits:
        message = f"this is published already, as version {number} ({record.label}, {record.state})"
        return Outcome(what, op.service.name, False, message, op.dry_run, after={"version": number})
    outcome = Outcome(
        what,
        op.service.name,
        True,
        f"version {number} ({record.label}) is loaded again",
        op.dry_run,
        {"version": number, "state": record.state.value},
        {"version": number},
    )
    if op.dry_run or op.control is None:
        return outcome
    with op.recorded(what, outcome.before, outcome.after):
        pass
    return _load(op, number, outcome)


def _outcome(op: Operation, what: str, number: int, version: VersionFile) -> Outcome:
    loaded = "loaded and ready" if op.control is not None else "staged; `piccard serve` loads it at its next start"
    message = f"version {number} ({version.label}) is {loaded}"
    return Outcome(what, op.service.name, True, message, op.dry_run, after={"version": number, "label": version.label})


def _load(op: Operation, number: int, outcome: Outcome) -> Outcome:
    if op.control is None:
        return outcome
    try:
        load_version(op.control, op.service, number, op.tell)
    except (OperationError, OSError) as error:
        raise OperationError(
            f"version {number} is marked failed, the others serve on: {error}; mend it and publish it again, "
            f"or `piccard retire {number}`"
        ) from error
    return outcome


def _stage(folder: Path, version: VersionFile) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_version(folder, version)
    if not version.linked:
        copy_code(folder)
    compile_file(folder / "model.py")


def _install(staged: Path, final: Path) -> None:
    if final.exists():
        raise OperationError(f"{final} is there already and no version of this home; run `piccard doctor`")
    os.rename(staged, final)
    sync_folder(final.parent)


def _record(op: Operation, number: int, label: str) -> None:
    with op.store.change() as state:
        time = now()
        state.versions[number] = VersionRecord(
            state=VersionState.STAGED, label=label, published_at=time, changed_at=time
        )
        state.next_version = number + 1


def _publish_service(op: Operation, version: VersionFile) -> Outcome:
    """Make a service with `version` as its first and stable one."""
    service = op.service
    if service.name == DEFAULT_SERVICE:
        raise OperationError(f"{service.home} holds no service {service.name}; run `piccard init {service.home}`")
    what = f"publish {version.label} as 1"
    outcome = _outcome(op, what, 1, version)
    op.tell(CODE_WARNING)
    if op.dry_run:
        return outcome
    with op.recorded(what, {}, outcome.after) as steps:
        steps.do(lambda: _make(op, version), undo=lambda: remove_service(service))
        if op.control is not None:
            control = op.control
            steps.do(lambda: _load_service(op, control), undo=lambda: _unload_service(op, control))
    return outcome


def _make(op: Operation, version: VersionFile) -> None:
    make_service(op.service, {1: version}, canary=None)
    if not version.linked:
        copy_code(op.service.version_folder(1))


def _load_service(op: Operation, control: TritonControl) -> None:
    from piccard.probe import probe_version
    from piccard.version_loading import PROBE_TIMEOUT, add_version

    op.tell("loading version 1")
    add_version(control, op.service, 1)
    op.tell("probing version 1")
    probe_version(control.address, op.service, 1, PROBE_TIMEOUT)
    for model in op.service.models[1:]:
        control.load_plain(op.service, model)


def _unload_service(op: Operation, control: TritonControl) -> None:
    loaded = {entry.model for entry in control.index() if entry.ready}
    for model in reversed(op.service.models):
        if model in loaded:
            control.unload(model)
