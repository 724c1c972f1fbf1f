"""A rollout told to people."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any


def lines(found: dict[str, Any]) -> Iterator[str]:
    """What `piccard.rollout.commands.status` found, in lines."""
    if not found:
        yield "there was no rollout yet; `piccard rollout start --version N` begins one"
        return
    yield (
        f"version {found['canary']} beside {found['stable']}: {found['phase']}, step {100 * found['ratio']:g} %"
        + (f": {found['reason']}" if found["reason"] else "")
    )
    if found["controller"] is None:
        yield "nobody runs it: `piccard serve` does, or `piccard rollout run`"
    judgement = found["judgement"]
    if judgement is not None:
        yield f"last look: {judgement['verdict']}: {judgement['why']}"
        yield from (_metric(name, metric) for name, metric in judgement["metrics"].items())
    for event in found["events"]:
        yield f"{datetime.fromtimestamp(event['at'], UTC):%Y-%m-%d %H:%M:%S}  {event['what']}"


def summary_line(name: str, found: dict[str, Any]) -> str:
    """One scenario of the simulator."""
    parts = [f"{100 * found[key]:5.1f} % {key}" for key in ("promoted", "aborted", "rolled_back", "waits_for_a_person")]
    if "caught" in found:
        parts.append(f"{100 * found['caught']:.1f} % caught before {100 * found['caught_before']:g} % of the traffic")
    return f"{name:32} {', '.join(parts)}, {found['median_requests_harmed']:g} requests harmed"


def _metric(name: str, metric: dict[str, Any]) -> str:
    needed = "" if metric["required"] else ", need not pass here"
    return f"  {name:16} {metric['verdict']:12} {metric['why']}{needed}"
