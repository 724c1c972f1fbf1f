"""`piccard doctor`: looks for every known trap in a home and says what to do; --repair mends what can be mended."""

from __future__ import annotations

import os
from collections.abc import Iterator

from piccard.agreement_checks import (
    config_findings,
    index_findings,
    interrupted_findings,
    policy_findings,
    process_findings,
    stable_findings,
)
from piccard.disk_checks import compiled_findings, folder_findings, pin_findings, secret_findings, version_findings
from piccard.drift import drift_findings
from piccard.errors import OperationError
from piccard.finding import Finding
from piccard.found_server import find_server
from piccard.kept_file_checks import kept_file_findings
from piccard.mps import environment_of, has_gpu, mps_note
from piccard.operation import Operation
from piccard.operator_notes import live_operators, operator_notes
from piccard.outcome import Outcome
from piccard.prerequisites import problems
from piccard.server_settings import ServerSettings
from piccard.shared_memory import dead_regions, remove_regions
from piccard.state_store import services_of
from piccard.triton_binary import find_triton
from piccard.triton_control import find_supervisor


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
        try:
            with op.recorded(f"doctor --repair {finding.trap}", {"problem": finding.problem}, {}):
                finding.repair()
        except (OperationError, OSError) as error:
            # One that cannot be mended keeps nobody from mending the others; it is found again below.
            op.tell(f"{finding.trap} was not repaired: {error}")
            continue
        repaired.append(finding)
    return list(findings(op)), repaired


def notes(op: Operation) -> Iterator[str]:
    """What is worth knowing and no trap: how versions share a GPU, and what serves their operators."""
    if has_gpu():
        running = find_server(op.service.home)
        yield mps_note(os.environ if running is None else environment_of(running.pid))
    try:
        reports = live_operators(op.service)
    except OperationError as error:
        yield f"what serves the operators cannot be told: {error}"
        return
    for report in reports.values():
        yield from operator_notes(report)


def outcome_of(op: Operation, found: list[Finding], repaired: list[Finding], told: list[str]) -> Outcome:
    """The same and the notes as an outcome, for --json."""
    message = f"{len(found)} found, {len(repaired)} repaired" if found or repaired else "nothing is wrong"
    as_data = [{"trap": item.trap, "problem": item.problem, "remedy": item.remedy} for item in found]
    mended = [{"trap": item.trap, "problem": item.problem} for item in repaired]
    after = {"findings": as_data, "notes": told}
    return Outcome("doctor", op.service.name, bool(repaired), message, op.dry_run, {"repaired": mended}, after)


def findings(op: Operation) -> Iterator[Finding]:
    """Every trap that the service's home is in, those first on which others depend."""
    yield from _machine(op)
    yield from secret_findings(op)
    try:
        state = op.store.read()
    except OperationError as error:
        yield Finding("state", str(error), "restore state.json from a backup, or make a new home")
        return
    yield from folder_findings(op, state)
    yield from version_findings(op, state)
    yield from stable_findings(op, state)
    yield from policy_findings(op, state)
    yield from kept_file_findings(op)
    yield from interrupted_findings(op, state)
    yield from config_findings(op, state)
    yield from compiled_findings(op)
    yield from pin_findings(op)
    yield from index_findings(op, state)
    yield from drift_findings(op, state)
    yield from process_findings(op)


def _machine(op: Operation) -> Iterator[Finding]:
    home = op.service.home
    running = find_server(home)
    supervised = find_supervisor(home, services_of(home)) is not None
    if running is not None and not supervised:
        yield Finding(
            "supervisor",
            f"tritonserver (process {running.pid}) runs and nobody looks after it: what dies there stays dead",
            "run `piccard serve`, which takes it over as it runs",
        )
    # A server in another container is seen by its supervisor's lock alone, and so not by its name.
    unseen = supervised and running is None
    leftovers = [] if unseen else dead_regions(home, running.region_prefix if running else None)
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
