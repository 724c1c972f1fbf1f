"""What `piccard serve` begins with: a server of its own, or the one that a killed supervisor left running."""

from collections.abc import Iterable
from enum import StrEnum

from piccard_contract.home import Service
from piccard_contract.live_state import LiveState
from piccard_contract.reports import SupervisorReport

from piccard.found_server import FoundServer
from piccard.server_settings import ServerSettings


class Beginning(StrEnum):
    """How a supervisor begins."""

    START = "start"
    TAKE_OVER = "take over"
    # The one before was told to end it, and died before it was done.
    END_AND_START = "end and start"


def beginning(found: FoundServer | None, reports: Iterable[SupervisorReport]) -> Beginning:
    """How to begin.

    Args:
        found: the server that runs.
        reports: what the supervisor before published last.
    """
    if found is None:
        return Beginning.START
    was_ending = any(report.server_pid == found.pid and report.details.get("phase") == "stopping" for report in reports)
    return Beginning.END_AND_START if was_ending else Beginning.TAKE_OVER


def last_reports(services: Iterable[Service]) -> list[SupervisorReport]:
    """What the supervisor of `services` published last, whether or not it lives."""
    reports = []
    for service in services:
        if not service.live_state.exists():
            continue
        state = LiveState(service.live_state, service.run_folder)
        try:
            section = state.read("supervisor")
        finally:
            state.close()
        if section is not None:
            reports.append(SupervisorReport.model_validate(section.data))
    return reports


def differing_options(asked: ServerSettings, found: ServerSettings) -> list[str]:
    """Options that a server which runs does not follow, as option=value; they count at its next start."""
    differing = [
        f"{option}={port}"
        for option, port in asked.ports.items()
        if option != "--health-port" and port != found.ports[option]
    ]
    if asked.host != found.host:
        differing.append(f"--host={asked.host}")
    if asked.exit_timeout != found.exit_timeout:
        differing.append(f"--exit-timeout={asked.exit_timeout}")
    return differing
