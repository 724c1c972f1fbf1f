"""Makes a home: a service's model folders, its versions, state and policy."""

import os
import shutil
from pathlib import Path

from piccard_contract.home import Service
from piccard_contract.lifecycle import ServiceState, VersionRecord, VersionState, now
from piccard_contract.policy import Policy
from piccard_contract.version_file import Profile, Runner, VersionFile

from piccard.audit import write_audit
from piccard.errors import OperationError
from piccard.exports import Tell, with_export
from piccard.keys import admin_key_path, make_secret
from piccard.outcome import Outcome
from piccard.pin import set_pin
from piccard.policy_store import new_salt, write_policy
from piccard.repository import compile_models, point_stable, write_service, write_version
from piccard.snapshot import installed_code_hash
from piccard.state_store import StateStore, operator_lock

SHIPPED_RATIO = 0.10


def shipped_versions(checkpoint: str, runner: Runner | None = None) -> dict[int, VersionFile]:
    """Versions 1 and 2 of a new home: one checkpoint under two runners and engine profiles, or all under `runner`."""
    settings = {1: ("v1.0.0", Runner.TORCH, Profile.BALANCED), 2: ("v1.1.0", Runner.ONNXRUNTIME, Profile.LATENCY)}
    return {
        number: VersionFile(label=label, checkpoint=checkpoint, runner=runner or own, profile=profile, linked=True)
        for number, (label, own, profile) in settings.items()
    }


def init_home(home: Path, versions: dict[int, VersionFile], *, dry_run: bool = False, tell: Tell = print) -> Outcome:
    """Make a home with a service `deepseek`: the lowest version is stable, the next the canary at 10 %.

    A home that is there already is left as it is. A version of runner onnxruntime is exported; where that cannot be,
    torch runs it, and `tell` is called with the reason.

    Raises:
        OperationError: the folder cannot be made or written.
    """
    service = Service(home.absolute())
    what = f"init {home}"
    if StateStore(service).exists:
        return Outcome(what, service.name, changed=False, message=f"{home} is a home already", dry_run=dry_run)
    numbers = sorted(versions)
    message = f"made {home} with versions {', '.join(map(str, numbers))}, stable -> {numbers[0]}"
    outcome = Outcome(what, service.name, changed=True, message=message, dry_run=dry_run, after={"versions": numbers})
    if dry_run:
        return outcome
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OperationError(f"{home} cannot be made ({error.strerror}); name another folder with --home") from error
    if not os.access(home, os.W_OK | os.X_OK):
        raise OperationError(f"{home} is read-only for you; name another folder with --home")
    versions = {number: _with_code(version) for number, version in versions.items()}
    with operator_lock(home):
        versions = {number: _with_export(service, version, tell) for number, version in versions.items()}
        make_service(service, versions, canary=numbers[1] if len(numbers) > 1 else None)
        make_secret(admin_key_path(service.home))
        write_audit(service, what, {}, outcome.after)
    return outcome


def _with_export(service: Service, version: VersionFile, tell: Tell) -> VersionFile:
    try:
        return with_export(service, version, service.home / version.checkpoint, tell)
    except OperationError as error:
        tell(f"{version.label} is served with runner torch: {error}")
        return version.model_copy(update={"runner": Runner.TORCH})


def _with_code(version: VersionFile) -> VersionFile:
    """The version with the hash of the installed code, which a linked one begins with."""
    hashes = version.hashes.model_copy(update={"code": version.hashes.code or installed_code_hash()})
    return version.model_copy(update={"hashes": hashes})


def make_service(service: Service, versions: dict[int, VersionFile], *, canary: int | None) -> None:
    """Write the folders, state and policy of `service`; the lowest version is its stable one."""
    stable = min(versions)
    write_service(service, stable)
    for number, version in versions.items():
        write_version(service.version_folder(number), version)
    compile_models(service)
    point_stable(service, stable)
    for model in service.models:
        set_pin(service.repository / model)
    for folder in (service.run_folder, service.request_log.parent, service.staging):
        folder.mkdir(parents=True, exist_ok=True)
    policy = Policy(canary=canary, traffic_ratio=SHIPPED_RATIO if canary else 0.0, salt=new_salt())
    write_policy(service, policy)
    # The state comes last: with it the service is there.
    StateStore(service).write(_first_state(service, versions, stable, canary))


def remove_service(service: Service) -> None:
    """Take away everything that `make_service` made."""
    for model in service.models:
        shutil.rmtree(service.repository / model, ignore_errors=True)
    for folder in (service.state_folder, service.staging):
        shutil.rmtree(folder, ignore_errors=True)


def _first_state(service: Service, versions: dict[int, VersionFile], stable: int, canary: int | None) -> ServiceState:
    time = now()
    states = {stable: VersionState.STABLE, canary: VersionState.CANARY}
    return ServiceState(
        service=service.name,
        next_version=max(versions) + 1,
        stable=stable,
        canary=canary,
        versions={
            number: VersionRecord(
                state=states.get(number, VersionState.STAGED), label=version.label, published_at=time, changed_at=time
            )
            for number, version in versions.items()
        },
    )
