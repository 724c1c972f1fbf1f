"""Where state, link, policy, configuration and server disagree."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

from piccard_contract.home import version_owner
from piccard_contract.lifecycle import ServiceState, VersionState
from piccard_contract.live_state import LiveState
from piccard_contract.process_lock import is_held

from piccard.errors import OperationError
from piccard.finding import Finding
from piccard.model_config import config_text, model_configs
from piccard.operation import Operation
from piccard.policy_store import load_policy, update_policy
from piccard.repository import (
    configured_versions,
    point_stable,
    stable_target,
    write_service,
)
from piccard.version_loading import add_version, drop_version, move


def stable_findings(op: Operation, state: ServiceState) -> Iterator[Finding]:
    """Whether the link names the stable version."""
    service, stable = op.service, state.stable
    if stable is None:
        yield Finding("stable-link", "no version is stable", "`piccard promote N` chooses one")
        return
    link = service.stable_link
    if link.exists() and not link.is_symlink():
        yield Finding("stable-link", f"{link} is no link", "remove it and run `piccard doctor --repair`")
        return
    if stable_target(service) != stable:
        target = os.readlink(link) if link.is_symlink() else "missing"
        yield Finding(
            "stable-link",
            f"{link} is {target}, state.json says version {stable}",
            "--repair points it there: state.json is the truth",
            (lambda: point_stable(service, stable)) if service.version_folder(stable).is_dir() else None,
        )


def policy_findings(op: Operation, state: ServiceState) -> Iterator[Finding]:
    """Whether policy.yaml can be read and names the canary of the state."""
    try:
        policy = load_policy(op.service)
    except OperationError as error:
        yield Finding("policy", str(error), "mend it; routers go on with the last good one until they restart")
        return
    if policy.canary != state.canary:
        values = {"canary": state.canary, **({} if state.canary else {"traffic_ratio": 0.0})}
        yield Finding(
            "policy",
            f"{op.service.policy_file} names canary {policy.canary}, state.json {state.canary}",
            "`piccard canary set`, or --repair, which follows state.json",
            lambda: update_policy(op.service, **values),
        )


def interrupted_findings(op: Operation, state: ServiceState) -> Iterator[Finding]:
    """Versions that were left half way."""
    for number, record in sorted(state.versions.items()):
        lives = is_held(op.service.process_lock(version_owner(number)))
        if record.state is VersionState.DRAINING and not lives:
            yield Finding(
                "interrupted",
                f"version {number} is draining and has no process",
                "--repair marks it retired",
                partial(move, op.store, number, VersionState.RETIRED),
            )
        if record.state in (VersionState.LOADING, VersionState.PROBING) and op.control is None:
            yield Finding(
                "interrupted",
                f"version {number} is {record.state} and no server runs",
                "`piccard serve` goes on with it at its next start",
            )


def config_findings(op: Operation, state: ServiceState) -> Iterator[Finding]:
    """Configurations that a start or a load would stumble over."""
    service = op.service
    if state.stable is None:
        return
    named = configured_versions(service)
    if named is not None and named != [state.stable]:
        yield Finding(
            "config",
            f"{service.llm_folder}/config.pbtxt names versions {named}, and a restart would load those",
            f"--repair makes it name the stable version {state.stable} alone",
            lambda: write_service(service, state.stable or 1),
        )
        return
    for model, config in model_configs(service, state.stable).items():
        path = service.repository / model / "config.pbtxt"
        if not path.is_file() or path.read_text(encoding="utf-8") != config_text(config):
            yield Finding(
                "config",
                f"{path} is not what this Piccard writes; a load would restart every version of {model}",
                "--repair writes it anew, once no server runs",
                None if op.control is not None else (lambda: write_service(service, state.stable or 1)),
            )


def index_findings(op: Operation, state: ServiceState) -> Iterator[Finding]:
    """Whether the server has loaded what the state says."""
    control, service = op.control, op.service
    if control is None:
        return
    ready = set(control.ready_versions(service.llm))
    serving = {n for n, r in state.versions.items() if r.state not in (VersionState.FAILED, VersionState.RETIRED)}
    serving -= {n for n, r in state.versions.items() if r.state is VersionState.DRAINING}
    waiting = {VersionState.STAGED, VersionState.LOADING, VersionState.PROBING}
    for number in sorted(serving - ready):
        if state.versions[number].state in waiting:
            continue
        yield Finding(
            "index",
            f"version {number} is {state.versions[number].state} and the server has not loaded it",
            "--repair loads it",
            partial(add_version, control, service, number),
        )
    for number in sorted(ready - serving):
        yield Finding(
            "index",
            f"version {number} is loaded and state.json does not want it",
            "--repair has the server drop it",
            partial(drop_version, control, service, number),
        )
    yield from _touched(op, ready)


def _touched(op: Operation, ready: set[int]) -> Iterator[Finding]:
    live = LiveState(op.service.live_state, op.service.run_folder)
    try:
        sections = {number: live.read(version_owner(number)) for number in ready}
    finally:
        live.close()
    for number, section in sorted(sections.items()):
        if section is None or not section.alive:
            yield Finding(
                "process", f"version {number} has no living process", "the supervisor starts it again within a second"
            )
            continue
        started = float(section.data.get("started_at", 0.0))
        folder = op.service.version_folder(number)
        newer = [path for path in sorted(folder.rglob("*")) if path.lstat().st_mtime > started]
        if newer and started:
            yield Finding(
                "live-version",
                f"{newer[0]} was written after version {number} was loaded; only the pin keeps it from a restart",
                "leave versions as they are; publish a new one instead",
            )
