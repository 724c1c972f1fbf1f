"""`piccard doctor`: looks for every known trap in a home and says what to do; --repair mends what can be mended."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from piccard_contract.home import version_owner
from piccard_contract.lifecycle import ServiceState, VersionState
from piccard_contract.live_state import LiveState
from piccard_contract.process_lock import is_held
from piccard_contract.version_file import VERSION_NAME, VersionFile, VersionFileError, read_version_file

from piccard.errors import OperationError
from piccard.keys import admin_key_path, make_secret, secret_problem
from piccard.model_config import config_text, model_configs
from piccard.operation import Operation
from piccard.outcome import Outcome
from piccard.pin import PIN_NAME, pin_problem, set_pin
from piccard.policy_store import load_policy, update_policy
from piccard.prerequisites import problems
from piccard.repository import (
    compile_file,
    configured_versions,
    point_stable,
    stable_target,
    version_numbers,
    write_service,
)
from piccard.server_settings import ServerSettings
from piccard.shared_memory import dead_regions, remove_regions
from piccard.snapshot import CODE_FOLDER, code_hash
from piccard.triton_binary import find_triton
from piccard.version_loading import add_version, drop_version, move

# Of a .pyc's header: bit 0 is hash-based, bit 1 is checked against the source.
_UNCHECKED_HASH = 0b01


@dataclass(frozen=True, slots=True)
class Finding:
    """One trap that a home is in.

    Attributes:
        trap: its name, for programs.
        problem: what is so, with the path.
        remedy: what to do.
        repair: what --repair does; None where a person has to.
    """

    trap: str
    problem: str
    remedy: str
    repair: Callable[[], object] | None = None


def doctor(op: Operation, *, repair: bool) -> tuple[list[Finding], list[Finding]]:
    """What is wrong with a service's home.

    Returns:
        findings that stand, and findings that were repaired.
    """
    found = list(findings(op))
    if not repair or op.dry_run:
        return found, []
    repaired = []
    for finding in found:
        if finding.repair is None:
            continue
        with op.recorded(f"doctor --repair {finding.trap}", {"problem": finding.problem}, {}):
            finding.repair()
        repaired.append(finding)
    return list(findings(op)), repaired


def outcome_of(op: Operation, found: list[Finding], repaired: list[Finding]) -> Outcome:
    """The same as an outcome, for --json."""
    message = f"{len(found)} found, {len(repaired)} repaired" if found or repaired else "nothing is wrong"
    as_data = [{"trap": item.trap, "problem": item.problem, "remedy": item.remedy} for item in found]
    mended = [{"trap": item.trap, "problem": item.problem} for item in repaired]
    return Outcome(
        "doctor", op.service.name, bool(repaired), message, op.dry_run, {"repaired": mended}, {"findings": as_data}
    )


def findings(op: Operation) -> Iterator[Finding]:
    """Every trap that the service's home is in, those first on which others depend."""
    yield from _machine(op)
    yield from _secrets(op)
    try:
        state = op.store.read()
    except OperationError as error:
        yield Finding("state", str(error), "restore state.json from a backup, or make a new home")
        return
    yield from _folders(op, state)
    yield from _versions(op, state)
    yield from _stable(op, state)
    yield from _policy(op, state)
    yield from _interrupted(op, state)
    yield from _configs(op, state)
    yield from _compiled(op)
    yield from _pins(op)
    yield from _index(op, state)


def _machine(op: Operation) -> Iterator[Finding]:
    leftovers = dead_regions(op.service.home)
    if leftovers:
        yield Finding(
            "shared-memory",
            f"{len(leftovers)} regions in {leftovers[0].parent} are left of a server that is gone",
            "they are removed at the next start, or by --repair",
            lambda: remove_regions(leftovers),
        )
    if op.control is not None:
        # A running server holds its ports, and what it needs it has.
        return
    for problem in problems(find_triton(), ServerSettings(), op.service.home, processes=5):
        trap = next((name for name in ("port", "numpy", "stub", "glibc", "libpython") if name in problem), "machine")
        yield Finding(trap, *_split(problem))


def _split(problem: str) -> tuple[str, str]:
    for mark in ("; ", ": "):
        before, found, after = problem.rpartition(mark)
        if found:
            return before, after
    return problem, "see docs/operations.md"


def _secrets(op: Operation) -> Iterator[Finding]:
    key = admin_key_path(op.service.home)
    if not key.exists():
        yield Finding("admin-key", f"{key} is missing", "--repair makes a new one", lambda: make_secret(key))
    for path in (key, op.service.gateway_secret):
        if problem := secret_problem(path):
            yield Finding("admin-key", problem, f"chmod 600 {path}", partial(path.chmod, 0o600))


def _folders(op: Operation, state: ServiceState) -> Iterator[Finding]:
    service = op.service
    for path in _dangling(service.repository):
        yield Finding(
            "dangling-link",
            f"{path} points at nothing; it breaks loading, and in the repository's root the index of everything",
            f"rm {path}, or restore what it points at",
        )
    if not service.llm_folder.is_dir():
        yield Finding("repository", f"{service.llm_folder} is missing", "restore it from a backup, or make a new home")
        return
    for entry in sorted(service.llm_folder.iterdir()):
        if entry.name in ("stable", "config.pbtxt", PIN_NAME) or re.match(VERSION_NAME, entry.name):
            continue
        worse = "a name of 19 digits or more ends the whole server" if entry.name.isdigit() else "Triton reads digits"
        odd = entry.is_dir() and entry.name[:1].isdigit()
        yield Finding(
            "folder-name",
            f"{entry} is no version of this home" + (f" ({worse})" if odd else ""),
            f"move it out of {service.llm_folder}",
        )
    for number in sorted(set(version_numbers(service)) - set(state.versions)):
        yield Finding(
            "unknown-version",
            f"{service.version_folder(number)} is a version that state.json does not know",
            f"move it out of {service.llm_folder}; `piccard publish` makes versions",
        )
    leftovers = sorted(service.staging.iterdir()) if service.staging.is_dir() else []
    if leftovers:
        yield Finding(
            "staging",
            f"{leftovers[0]} is left of a publication that was interrupted",
            "--repair removes it; publish again",
            lambda: [*map(shutil.rmtree, leftovers)],
        )


def _dangling(repository: Path) -> Iterator[Path]:
    for folder, names, files in os.walk(repository):
        for name in (*names, *files):
            path = Path(folder, name)
            if path.is_symlink() and not path.exists():
                yield path


def _versions(op: Operation, state: ServiceState) -> Iterator[Finding]:
    for number, record in sorted(state.versions.items()):
        folder = op.service.version_folder(number)
        if record.state is VersionState.RETIRED:
            continue
        try:
            version = read_version_file(folder)
        except (OSError, VersionFileError) as error:
            yield Finding("version", f"version {number} cannot be read: {error}", f"publish it again, retire {number}")
            continue
        yield from _version(op, number, folder, version)


def _version(op: Operation, number: int, folder: Path, version: VersionFile) -> Iterator[Finding]:
    checkpoint = op.service.home / version.checkpoint
    if version.runner != "scripted" and not (checkpoint / "config.json").is_file():
        yield Finding(
            "checkpoint", f"the checkpoint of version {number} is not at {checkpoint}", "bring it back, or retire it"
        )
    code = folder / CODE_FOLDER
    if not version.linked and version.hashes.code and (not code.is_dir() or code_hash(code) != version.hashes.code):
        yield Finding("code", f"the code in {code} is not what version {number} was published with", "publish it again")


def _stable(op: Operation, state: ServiceState) -> Iterator[Finding]:
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


def _policy(op: Operation, state: ServiceState) -> Iterator[Finding]:
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


def _interrupted(op: Operation, state: ServiceState) -> Iterator[Finding]:
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


def _configs(op: Operation, state: ServiceState) -> Iterator[Finding]:
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


def _compiled(op: Operation) -> Iterator[Finding]:
    stale = []
    for model in op.service.models:
        for folder in sorted((op.service.repository / model).glob("[0-9]*")):
            if re.match(VERSION_NAME, folder.name):
                stale += [path for path in sorted(folder.rglob("*.py")) if not _is_compiled(path)]
    if stale:
        yield Finding(
            "pycache",
            f"{stale[0]} and {len(stale) - 1} more are not compiled for good; a server would write beside them",
            "--repair compiles them",
            lambda: [compile_file(path) for path in stale],
        )


def _is_compiled(path: Path) -> bool:
    compiled = Path(importlib.util.cache_from_source(str(path)))
    try:
        with open(compiled, "rb") as file:
            header = file.read(8)
    except OSError:
        return False
    fits = header[:4] == importlib.util.MAGIC_NUMBER
    return fits and int.from_bytes(header[4:8], "little") == _UNCHECKED_HASH


def _pins(op: Operation) -> Iterator[Finding]:
    for model in op.service.models:
        folder = op.service.repository / model
        if not folder.is_dir():
            continue
        if problem := pin_problem(folder):
            yield Finding(
                "pin",
                f"{problem}; the next load would restart every version of {model}",
                "end the server, then start it again: `piccard serve` sets the pin"
                if op.control is not None
                else "`piccard serve` sets it before it starts the server, and so does --repair",
                None if op.control is not None else partial(set_pin, folder),
            )


def _index(op: Operation, state: ServiceState) -> Iterator[Finding]:
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
