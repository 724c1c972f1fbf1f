"""Where state, link, policy, configuration and server disagree."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial

from piccard_contract.home import version_owner
from piccard_contract.lifecycle import SERVING_STATES, UNPROVEN_STATES, ServiceState, VersionState, now
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
from piccard.revive import candidates, is_due, start_again
from piccard.triton_control import supervisor_gives_up, supervisor_phase
from piccard.version_loading import add_version, drop_version, forget, load_version, move


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
        # The ratio there was meant for another version.
        values = {"canary": state.canary, "traffic_ratio": 0.0}
        yield Finding(
            "policy",
            f"{op.service.policy_file} names canary {policy.canary}, state.json {state.canary}",
            "`piccard canary set`, or --repair, which follows state.json and sets the ratio to 0",
            lambda: update_policy(op.service, **values),
        )


def interrupted_findings(op: Operation, state: ServiceState) -> Iterator[Finding]:
    """Versions that were left half way."""
    if state.previous is not None and state.previous_since and datetime.fromisoformat(state.previous_since) > _now():
        yield Finding(
            "clock",
            f"version {state.previous} became previous at {state.previous_since}, which is yet to come",
            "set the clock right, or --repair, which counts its bake time from now",
            partial(_bake_from_now, op),
        )
    for number, record in sorted(state.versions.items()):
        lives = is_held(op.service.process_lock(version_owner(number)))
        if record.state is VersionState.STAGED and not op.service.version_folder(number).is_dir():
            yield Finding(
                "interrupted",
                f"the publication of version {number} ended before its folder was there",
                "publish it again; --repair takes it off the list",
                partial(forget, op.store, number),
            )
            continue
        if record.state is VersionState.DRAINING and not lives:
            yield Finding(
                "interrupted",
                f"version {number} is draining and has no process",
                "--repair marks it retired",
                partial(move, op.store, number, VersionState.RETIRED),
            )
        if record.state in UNPROVEN_STATES:
            yield from _unproven(op, number, record.state)


def _unproven(op: Operation, number: int, found: VersionState) -> Iterator[Finding]:
    """A version that is not loaded and probed yet, while nobody is at it."""
    if op.control is None:
        # A staged one is as it should be, until a server starts.
        if found is not VersionState.STAGED:
            yield Finding(
                "interrupted",
                f"version {number} is {found} and no server runs",
                "`piccard serve` goes on with it at its next start",
            )
    elif supervisor_phase(op.service) == "serving":
        yield Finding(
            "interrupted",
            f"version {number} is {found}, and what loads it may have been interrupted",
            "wait for the command that publishes it; else --repair loads it",
            partial(load_version, op.control, op.service, number, op.tell),
        )


def _now() -> datetime:
    return datetime.now(UTC)


def _bake_from_now(op: Operation) -> None:
    with op.store.change() as state:
        state.previous_since = now()


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
    serving = {n for n, r in state.versions.items() if r.state in SERVING_STATES}
    for number in sorted(serving - ready):
        yield Finding(
            "index",
            f"version {number} is {state.versions[number].state} and the server has not loaded it",
            "--repair loads it",
            partial(add_version, control, service, number),
        )
    unproven = {n for n, r in state.versions.items() if r.state in UNPROVEN_STATES}
    for number in sorted(ready - serving - unproven):
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
            # process_findings tells of it.
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


def process_findings(op: Operation) -> Iterator[Finding]:
    """Dead processes that should live."""
    control, service = op.control, op.service
    if control is None:
        return
    phase, given_up = supervisor_phase(service), supervisor_gives_up(service)
    for place in candidates(op):
        failed = place.is_version and op.store.read().versions[place.number].state is VersionState.FAILED
        if failed or not is_due(op, place):
            continue
        if phase and place.full_name not in given_up:
            yield Finding("process", f"{place.name} has no living process", "`piccard serve` is starting it again")
            continue
        why = given_up.get(place.full_name, "nobody looks after the server")
        yield Finding(
            "process",
            f"{place.name} has no living process, and nobody starts it: {why}",
            f"mend what made it die, then `piccard revive {place.name}`, or --repair, which does the same",
            partial(start_again, op, control, place),
        )
