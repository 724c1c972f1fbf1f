"""Which processes run other code than is installed, and which versions other code than they were published with.

An upgrade of the packages reaches nothing that runs: linked versions, admission and routers take the installed code at
their next start, whenever that is. Until then a start by accident would change what they do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

from piccard_contract.code_hash import ENSEMBLE_PACKAGES, installed_hash
from piccard_contract.home import version_owner
from piccard_contract.lifecycle import ServiceState
from piccard_contract.live_state import Section
from piccard_contract.version_file import VersionFile, VersionFileError, read_version_file

from piccard.finding import Finding
from piccard.operation import Operation, sections_of
from piccard.places import steps
from piccard.snapshot import installed_code_hash


@cache
def installed_ensemble_hash() -> str:
    """The hash of the installed code of admission and routers."""
    return installed_hash(ENSEMBLE_PACKAGES)


def version_drift(version: VersionFile | None, section: Section | None) -> str:
    """How the code of a version differs from what it should be, in words; empty where it does not.

    Args:
        version: its version.yaml, or None where that cannot be read.
        section: what its process published, or None.
    """
    if version is None:
        return ""
    published, running = version.hashes.code or "", code_of(section)
    if not version.linked:
        if running and published and running != published:
            return f"runs code {short(running)}, and its snapshot was published as {short(published)}"
        return ""
    installed = installed_code_hash()
    if running and running != installed:
        return f"runs code {short(running)}; installed is {short(installed)}, which it takes at its next start"
    if published and published != installed:
        runs = "runs" if running else "would run"
        return f"{runs} the installed code {short(installed)}; it was published with {short(published)}"
    return ""


def step_drift(section: Section | None) -> str:
    """How the code of admission or a router differs from what is installed; empty where it does not."""
    running, installed = code_of(section), installed_ensemble_hash()
    if not running or running == installed:
        return ""
    return f"runs code {short(running)}; installed is {short(installed)}"


def drift_findings(op: Operation, state: ServiceState) -> Iterator[Finding]:
    """Processes that an accidental start would change."""
    sections = sections_of(op.service)
    for number in sorted(state.versions):
        section = sections.get(version_owner(number))
        drift = version_drift(version_file(op, number), section)
        if drift and code_of(section) not in ("", installed_code_hash()):
            yield Finding(
                "drift",
                f"version {number} {drift}",
                "publish it anew without --linked and promote that: a version with a snapshot keeps its code",
            )
    for owner in step_owners(op, sections):
        if drift := step_drift(sections[owner]):
            yield Finding("drift", f"{owner} {drift}", "`piccard roll` moves it over without losing a request")


def step_owners(op: Operation, sections: Mapping[str, Section]) -> list[str]:
    """The processes of admission and routers, of both folders."""
    return [owner for owner in sorted(sections) if owner.removesuffix(".2") in steps(op.service).values()]


def version_file(op: Operation, number: int) -> VersionFile | None:
    """version.yaml of a version; None where it cannot be read."""
    try:
        return read_version_file(op.service.version_folder(number))
    except (OSError, VersionFileError):
        return None


def code_of(section: Section | None) -> str:
    """The hash of the code that a living process runs; empty where none lives or it tells none."""
    return str(section.data.get("code_hash", "")) if section is not None and section.alive else ""


def short(code_hash: str) -> str:
    """A hash as people are told it."""
    return code_hash[:12]
