"""`piccard status`: what the home says, what the server has loaded, and what each process published."""

from pathlib import Path
from statistics import median_low
from typing import Any

from piccard_contract.home import Service, version_owner
from piccard_contract.live_state import Section
from piccard_contract.operators import OperatorsReport
from piccard_contract.reports import ShadowReport

from piccard.drift import code_of, installed_ensemble_hash, step_drift, step_owners, version_drift, version_file
from piccard.errors import OperationError
from piccard.found_server import find_server
from piccard.operation import Operation, sections_of
from piccard.operator_notes import live_operators
from piccard.policy_store import load_policy, policy_in_use
from piccard.repository import stable_target
from piccard.snapshot import installed_code_hash


def status(op: Operation, *, verbose: bool = False) -> dict[str, Any]:
    """The service as one JSON object.

    Args:
        verbose: with what serves the operators of each version that runs.
    """
    state = op.store.read()
    operators = live_operators(op.service) if verbose else {}
    sections = sections_of(op.service)
    steps = step_owners(op, sections)
    loaded = set(op.control.ready_versions(op.service.llm)) if op.control is not None else set()
    return {
        "service": op.service.name,
        "home": str(op.service.home),
        "server": _server(sections) or _unsupervised(op.service.home),
        "stable": state.stable,
        "link": stable_target(op.service),
        "canary": state.canary,
        "previous": state.previous,
        "policy": _policy(op.service),
        "policy_error": _value(sections, "admission", "policy_error", ""),
        "installed_code": {"engine": installed_code_hash(), "ensemble": installed_ensemble_hash()},
        "versions": [
            {
                "version": number,
                "label": record.label,
                "state": record.state.value,
                "reason": record.reason,
                "changed_at": record.changed_at,
                "loaded": number in loaded,
                **_code(op, number, sections.get(version_owner(number))),
                **_process(sections.get(version_owner(number))),
                "in_flight": _in_flight(sections, number),
                "breaker": _breaker(sections, number),
                **({"operators": _dumped(operators.get(number))} if verbose else {}),
            }
            for number, record in sorted(state.versions.items())
        ],
        "shadows": _shadows(sections),
        "processes": {
            owner: {
                "pid": section.pid,
                "alive": section.alive,
                "code": code_of(section),
                "drift": step_drift(section) if owner in steps else "",
            }
            for owner, section in sorted(sections.items())
        },
    }


def _dumped(report: OperatorsReport | None) -> dict[str, Any] | None:
    return None if report is None else {**report.model_dump(mode="json"), "fused_share": report.fused_share}


def _code(op: Operation, number: int, section: Section | None) -> dict[str, Any]:
    version = version_file(op, number)
    return {
        "linked": None if version is None else version.linked,
        "code": code_of(section),
        "published_code": "" if version is None else version.hashes.code or "",
        "drift": version_drift(version, section),
    }


def _server(sections: dict[str, Section]) -> dict[str, Any] | None:
    section = sections.get("supervisor")
    if section is None or not section.alive:
        return None
    data = section.data
    names = ("http", "grpc", "metrics", "revivals", "next_start", "given_up")
    details = data.get("details", {})
    return {
        **{name: data.get(name) for name in names},
        "pid": data.get("server_pid"),
        "health": details.get("health"),
        "gateway": details.get("gateway"),
        "phase": details.get("phase"),
    }


def _unsupervised(home: Path) -> dict[str, Any] | None:
    """A server whose supervisor was killed; nobody starts again what dies there."""
    found = find_server(home)
    if found is None:
        return None
    addresses = {name: found.settings.address(name) for name in ("http", "grpc", "metrics")}
    return {
        **addresses,
        "revivals": {},
        "next_start": {},
        "given_up": {},
        "pid": found.pid,
        "health": None,
        "gateway": None,
        "phase": "unsupervised",
    }


def _policy(service: Service) -> dict[str, Any]:
    """The policy in use; `error` says why that is not what policy.yaml holds."""
    try:
        return load_policy(service).model_dump(mode="json", by_alias=True)
    except OperationError as error:
        return {**policy_in_use(service).model_dump(mode="json", by_alias=True), "error": str(error)}


def _value(sections: dict[str, Section], owner: str, key: str, default: Any) -> Any:
    section = sections.get(owner)
    return section.data.get(key, default) if section is not None and section.alive else default


def _process(section: Section | None) -> dict[str, Any]:
    if section is None or not section.alive:
        return {"pid": None, "phase": None}
    names = ("phase", "progress", "started_at", "device", "running", "waiting", "free_blocks", "total_blocks")
    return {"pid": section.pid, **{name: section.data.get(name) for name in names}}


_ROUTERS = ("router", "router.2", "router_unary", "router_unary.2")


def _in_flight(sections: dict[str, Section], version: int) -> int:
    return sum(int(_value(sections, owner, "in_flight", {}).get(str(version), 0)) for owner in _ROUTERS)


def _shadows(sections: dict[str, Section]) -> dict[str, dict[str, Any]]:
    """What came of mirrored requests, by the version that they were mirrored to."""
    told: dict[str, list[ShadowReport]] = {}
    for owner in _ROUTERS:
        for version, report in _value(sections, owner, "shadows", {}).items():
            told.setdefault(version, []).append(ShadowReport.model_validate(report))
    found = {}
    for version, reports in told.items():
        compared, agreed = sum(one.compared for one in reports), sum(one.agreed for one in reports)
        differences = [position for one in reports for position in one.first_differences]
        found[version] = {
            "pairs": sum(one.pairs for one in reports),
            "compared": compared,
            "agreed": agreed,
            "first_difference": median_low(differences) if differences else None,
        }
    return found


def _breaker(sections: dict[str, Section], version: int) -> dict[str, str]:
    """The state of its breaker, by router."""
    told = {owner: _value(sections, owner, "breakers", {}).get(str(version)) for owner in _ROUTERS}
    return {owner: report["state"] for owner, report in told.items() if report is not None}
