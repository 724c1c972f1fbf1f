"""Lines of the request log as observations of versions."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any

from piccard_contract.errors import ErrorCode, Fault, kind_of
from piccard_contract.routing import RouteReason

from piccard_canary.rollout.observations import Observation

# Requests that chance sent where they went. Those that chose their version are not like the others.
_CHANCE = frozenset(
    {
        RouteReason.STICKY,
        RouteReason.RATIO,
        RouteReason.STABLE,
        RouteReason.CANARY_UNAVAILABLE,
        RouteReason.BREAKER_OPEN,
        RouteReason.FALLBACK,
    }
)


def parse_line(text: bytes) -> dict[str, Any] | None:
    """A line of the log; None where it is none, as after a power cut."""
    try:
        line = json.loads(text)
        ended_at(line)
    except (ValueError, TypeError, KeyError):
        return None
    return line if isinstance(line.get("code"), str) else None


def ended_at(line: dict[str, Any]) -> float:
    """Unix time of a line's end."""
    return datetime.fromisoformat(line["at"]).timestamp()


def observed(line: dict[str, Any], canary: int) -> Iterator[tuple[int, Observation]]:
    """What a line says of each version that took its request, with the version's number.

    A version that failed it failed, also where another one brought it to its end. What was the client's fault, or was
    cancelled, says nothing of a version. One that was not loaded, or whose breaker was open, failed what it missed.
    """
    if line.get("shadow") is not None:
        # Half of a pair; the other half has a line of its own. One that failed harmed nobody.
        if line["code"] == "OK" and line.get("version") is not None:
            yield line["version"], replace(_measured(line), shadow=True)
        return
    if line.get("decision") not in _CHANCE:
        return
    # An older router does not tell of it. Who asked for a canary where none was set missed none.
    missed = line.get("passed_over", canary if line["decision"] == RouteReason.CANARY_UNAVAILABLE else None)
    if missed is not None:
        yield missed, Observation(failed=True, fallback=True)
    attempts = line.get("attempts", [])
    code = line["code"]
    for index, attempt in enumerate(attempts):
        if not _versions_fault(attempt["code"]):
            continue
        version = attempt["version"]
        yield (
            version,
            Observation(
                failed=True,
                truncated=version in line.get("truncated", []),
                fallback=code == "OK" or index < len(attempts) - 1,
            ),
        )
    version = line.get("version")
    if version is None:
        return
    if code == "OK":
        yield version, Observation() if attempts else _measured(line)
    elif not attempts and _versions_fault(code):
        yield version, Observation(failed=True)


def _measured(line: dict[str, Any]) -> Observation:
    return Observation(
        first_token=_number(line, "first_token_s"),
        token_gap=_number(line, "token_gap_s"),
        first_load=_number(line, "first_load"),
        gap_load=_number(line, "gap_load"),
        others=float(line.get("others", 0)),
        prompt_tokens=int(line.get("prompt_tokens", 0)),
        completion_tokens=int(line.get("completion_tokens", 0)),
    )


def _number(line: dict[str, Any], key: str) -> float:
    value = line.get(key)
    return math.nan if value is None else float(value)


def _versions_fault(code: str) -> bool:
    # A newer router may tell of codes that this one does not know: they count.
    return code not in ErrorCode.__members__ or kind_of(ErrorCode(code)).fault is Fault.SERVER
