"""`piccard status` for people."""

from typing import Any

from rich.console import Console
from rich.table import Table


def print_status(found: dict[str, Any], console: Console) -> None:
    """Print what `piccard.status.status` found."""
    server, policy = found["server"], found["policy"]
    where = f"http {server['http']}, gRPC {server['grpc']}, {server['phase']}" if server else "no server runs"
    console.print(f"[bold]{found['service']}[/bold] in {found['home']}: {where}", highlight=False, soft_wrap=True)
    ratio = policy.get("traffic_ratio")
    canary = f"canary {policy['canary']} gets {100 * ratio:g} %" if ratio and policy.get("canary") else "no canary"
    console.print(f"stable -> {found['link']}, {canary}", highlight=False)
    table = Table(box=None, pad_edge=False)
    for heading in ("version", "label", "state", "process", "running", "waiting", "free blocks", "in flight", "reason"):
        table.add_column(heading, no_wrap=heading != "reason", overflow="fold")
    for version in found["versions"]:
        table.add_row(
            str(version["version"]),
            version["label"],
            version["state"],
            f"{version['phase']} ({version['pid']})" if version["pid"] else "-",
            *(_cell(version.get(name)) for name in ("running", "waiting")),
            f"{version['free_blocks']}/{version['total_blocks']}" if version["pid"] else "-",
            str(version["in_flight"]),
            version["reason"],
        )
    console.print(table)
    problem = policy.get("error") or found["policy_error"]
    if problem:
        console.print(f"policy.yaml is not in use: {problem}", highlight=False, soft_wrap=True)
    revivals = {owner: count for owner, count in ((server or {}).get("revivals") or {}).items() if count}
    if revivals:
        told = ", ".join(f"{owner} {count}" for owner, count in sorted(revivals.items()))
        console.print(f"started again after a death: {told}", highlight=False, soft_wrap=True)


def _cell(value: Any) -> str:
    return "-" if value is None else str(value)
