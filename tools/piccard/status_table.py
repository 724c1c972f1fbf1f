"""`piccard status` for people."""

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Table

_HEADINGS = (
    "version",
    "label",
    "code",
    "state",
    "process",
    "running",
    "waiting",
    "free blocks",
    "in flight",
    "reason",
)


def print_status(found: dict[str, Any], console: Console) -> None:
    """Print what `piccard.status.status` found."""
    server, policy = found["server"], found["policy"]
    where = ", ".join((*_addresses(server), server["phase"])) if server else "no server runs"
    console.print(f"[bold]{found['service']}[/bold] in {found['home']}: {where}", highlight=False, soft_wrap=True)
    ratio = policy.get("traffic_ratio")
    canary = f"canary {policy['canary']} gets {100 * ratio:g} %" if ratio and policy.get("canary") else "no canary"
    console.print(f"stable -> {found['link']}, {canary}", highlight=False)
    table = Table(box=None, pad_edge=False)
    for heading in _HEADINGS:
        table.add_column(heading, no_wrap=heading != "reason", overflow="fold")
    for version in found["versions"]:
        table.add_row(
            str(version["version"]),
            version["label"],
            version["code"][:8] or "-",
            version["state"],
            f"{version['phase']} ({version['pid']})" if version["pid"] else "-",
            *(_cell(version.get(name)) for name in ("running", "waiting")),
            f"{version['free_blocks']}/{version['total_blocks']}" if version["pid"] else "-",
            str(version["in_flight"]),
            version["reason"],
        )
    console.print(table)
    for line in (*_shadows(found), *_breakers(found)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for line in _drifts(found):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    problem = policy.get("error") or found["policy_error"]
    if problem:
        console.print(f"policy.yaml is not in use: {problem}", highlight=False, soft_wrap=True)
    for line in _deaths(server or {}):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _addresses(server: dict[str, Any]) -> Iterator[str]:
    """Where clients reach the service."""
    yield f"http {server['http']}"
    yield f"gRPC {server['grpc']}"
    if server["gateway"]:
        yield f"gateway http://{server['gateway']}/v1"


def _deaths(server: dict[str, Any]) -> Iterator[str]:
    """What died and what is done about it."""
    if server.get("phase") == "unsupervised":
        yield f"nobody looks after tritonserver (process {server['pid']}): `piccard serve` takes it over as it runs"
    revivals = {owner: count for owner, count in (server.get("revivals") or {}).items() if count}
    if revivals:
        told = ", ".join(f"{owner} {count}" for owner, count in sorted(revivals.items()))
        yield f"started again after a death: {told}"
    for owner, at in sorted((server.get("next_start") or {}).items()):
        yield f"{owner} is dead and is started again at {datetime.fromtimestamp(at):%H:%M:%S}"
    for owner, reason in sorted((server.get("given_up") or {}).items()):
        yield f"{owner} is given up: {reason}; `piccard revive {owner.split('/')[1]}` tries again"


def _shadows(found: dict[str, Any]) -> Iterator[str]:
    """How mirrored requests agree with what clients were answered."""
    for version, told in sorted(found["shadows"].items()):
        line = f"shadow: version {version} answered {told['pairs']} requests too"
        if told["compared"]:
            line += f", of {told['compared']} compared {100 * told['agreed'] / told['compared']:.4g} % agree"
        if told["first_difference"] is not None:
            line += f", others differ from token {told['first_difference']} on (median)"
        yield line


def _breakers(found: dict[str, Any]) -> Iterator[str]:
    """Versions that are kept from requests since they failed too many."""
    for version in found["versions"]:
        states = {owner: state for owner, state in version["breaker"].items() if state != "closed"}
        if states:
            told = ", ".join(f"{state.replace('_', ' ')} at {owner}" for owner, state in sorted(states.items()))
            yield f"version {version['version']}'s breaker is {told}: other versions serve its requests"


def _drifts(found: dict[str, Any]) -> Iterator[str]:
    """What runs other code than it should."""
    for version in found["versions"]:
        if version["drift"]:
            yield f"version {version['version']} ({'linked' if version['linked'] else 'snapshot'}) {version['drift']}"
    for owner, process in found["processes"].items():
        if process["drift"]:
            yield f"{owner} {process['drift']}: `piccard roll`"


def _cell(value: Any) -> str:
    return "-" if value is None else str(value)
