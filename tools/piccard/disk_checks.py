"""What of a home on disk would make a server stumble."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from piccard_contract.home import VERSION_NAME
from piccard_contract.lifecycle import ServiceState, VersionState
from piccard_contract.version_file import VersionFile, VersionFileError, read_version_file

from piccard.containment import check_version_folder
from piccard.durable_file import writer_of
from piccard.errors import OperationError
from piccard.exports import remove_unused, unused
from piccard.finding import Finding
from piccard.keys import admin_key_path, make_secret, secret_problem
from piccard.operation import Operation
from piccard.pin import PIN_NAME, pin_problem, set_pin
from piccard.repository import (
    compile_file,
    version_numbers,
)
from piccard.snapshot import CODE_FOLDER, code_hash, library_hash

# Of a .pyc's header: bit 0 is hash-based, bit 1 is checked against the source.
_UNCHECKED_HASH = 0b01


def folder_findings(op: Operation, state: ServiceState) -> Iterator[Finding]:
    """Links that point at nothing, and folders that Triton would take for something else."""
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
        if entry.name in ("stable", "config.pbtxt", PIN_NAME) or re.fullmatch(VERSION_NAME, entry.name):
            continue
        if writer_of(entry) is not None:
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
    yield from _escaping_links(op, state)
    yield from leftover_findings(op)


def _escaping_links(op: Operation, state: ServiceState) -> Iterator[Finding]:
    for number in sorted(state.versions):
        try:
            check_version_folder(op.service, number)
        except OperationError as error:
            yield Finding("escaping-link", str(error), f"publish version {number} again, then retire it")


def leftover_findings(op: Operation) -> Iterator[Finding]:
    """What commands that were ended left behind."""
    service = op.service
    folders = (service.home, service.state_folder, *(service.repository / model for model in service.models))
    files = [path for folder in folders if folder.is_dir() for path in sorted(folder.iterdir())]
    unfinished = [path for path in files if (pid := writer_of(path)) and not Path(f"/proc/{pid}").exists()]
    if unfinished:
        yield Finding(
            "leftover",
            f"{unfinished[0]} was being written when its command ended",
            "--repair removes it",
            lambda: _remove(unfinished),
        )
    kept = unused(service.home)
    if kept:
        yield Finding(
            "export",
            f"{kept[0]} is used by no version",
            "--repair removes it",
            lambda: remove_unused(service.home),
        )
    leftovers = sorted(service.staging.iterdir()) if service.staging.is_dir() else []
    if leftovers:
        yield Finding(
            "staging",
            f"{leftovers[0]} is left of a publication that was interrupted",
            "--repair removes it; publish again",
            lambda: [*map(shutil.rmtree, leftovers)],
        )


def _remove(paths: list[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _dangling(repository: Path) -> Iterator[Path]:
    for folder, names, files in os.walk(repository):
        for name in (*names, *files):
            path = Path(folder, name)
            if path.is_symlink() and not path.exists():
                yield path


def version_findings(op: Operation, state: ServiceState) -> Iterator[Finding]:
    """Versions that are not what they were published as."""
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
    if version.export and not (op.service.home / version.export).is_dir():
        yield Finding(
            "export",
            f"the export of version {number} is not at {op.service.home / version.export}",
            f"publish it again, retire {number}",
        )
    library = op.service.home / version.ops_library if version.ops_library else None
    if library and (not library.is_file() or library_hash(library) != version.hashes.ops_library):
        yield Finding(
            "ops-library",
            f"{library} is not what version {number} was published with",
            f"publish it again, retire {number}",
        )
    code = folder / CODE_FOLDER
    if not version.linked and version.hashes.code and (not code.is_dir() or code_hash(code) != version.hashes.code):
        yield Finding("code", f"the code in {code} is not what version {number} was published with", "publish it again")


def compiled_findings(op: Operation) -> Iterator[Finding]:
    """Code that a server would compile, writing beside it."""
    stale = []
    for model in op.service.models:
        for folder in sorted((op.service.repository / model).glob("[0-9]*")):
            if re.fullmatch(VERSION_NAME, folder.name):
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


def pin_findings(op: Operation) -> Iterator[Finding]:
    """Model folders without their pin."""
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


def secret_findings(op: Operation) -> Iterator[Finding]:
    """Keys that others can read."""
    key = admin_key_path(op.service.home)
    if not key.exists():
        yield Finding("admin-key", f"{key} is missing", "--repair makes a new one", lambda: make_secret(key))
    for path in (key, op.service.gateway_secret):
        if problem := secret_problem(path):
            yield Finding("admin-key", problem, f"chmod 600 {path}", partial(path.chmod, 0o600))
