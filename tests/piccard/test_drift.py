"""Status and doctor tell what runs other code than is installed, or than it was published with."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from piccard import drift, publish, status
from piccard.doctor import findings
from piccard.operation import Operation
from piccard.snapshot import installed_code_hash
from piccard.state_store import StateStore
from piccard_contract.home import Service
from piccard_contract.live_state import LiveState
from piccard_contract.process_lock import ProcessLock
from piccard_contract.version_file import read_version_file

Piccard = Callable[..., "subprocess.CompletedProcess[str]"]
Report = Callable[[str, str], None]

OLD = "0" * 64


@pytest.fixture
def report(service: Service) -> Iterator[Report]:
    """Publishes as a living process: `report(owner, code_hash)`."""
    live = LiveState(service.live_state, service.run_folder)
    locks: list[ProcessLock] = []

    def publish(owner: str, code_hash: str) -> None:
        locks.append(ProcessLock(service.process_lock(owner)))
        locks[-1].acquire()
        live.writer(owner).publish({"phase": "ready", "code_hash": code_hash})

    yield publish
    for lock in locks:
        lock.release()
    live.close()


def upgrade(monkeypatch: pytest.MonkeyPatch, code_hash: str = "f" * 64) -> str:
    """As if other code were installed now."""
    for module in (drift, status, publish):
        monkeypatch.setattr(module, "installed_code_hash", lambda: code_hash)
    return code_hash


def drifts(piccard: Piccard, service: Service) -> dict[str, str]:
    """What status says differs, by version or process."""
    found = json.loads(piccard(service.home, "status", "--json").stdout)
    told = {str(version["version"]): version["drift"] for version in found["versions"]}
    told |= {owner: process["drift"] for owner, process in found["processes"].items()}
    return {name: drift for name, drift in told.items() if drift}


def problems(service: Service) -> list[str]:
    op = Operation(service, StateStore(service), None, dry_run=False, tell=print)
    return [finding.problem for finding in findings(op) if finding.trap == "drift"]


def test_nothing_differs_in_a_new_home(service: Service, piccard: Piccard, report: Report) -> None:
    report("version-1", installed_code_hash())
    report("router", drift.installed_ensemble_hash())
    assert drifts(piccard, service) == {}
    assert problems(service) == []
    found = json.loads(piccard(service.home, "status", "--json").stdout)
    assert found["versions"][0]["code"] == found["installed_code"]["engine"] == found["versions"][0]["published_code"]
    assert found["processes"]["router"]["code"] == found["installed_code"]["ensemble"]


def test_a_linked_version_that_runs_what_was_installed_before(
    service: Service, piccard: Piccard, report: Report
) -> None:
    report("version-1", OLD)
    told = drifts(piccard, service)
    assert list(told) == ["1"]
    assert "runs code 000000000000; installed is " in told["1"]
    assert problems(service) == [f"version 1 {told['1']}"]
    assert "version 1 (linked) runs code 0000" in piccard(service.home, "status").stdout


def test_a_linked_version_that_runs_other_code_than_it_was_published_with(
    service: Service, piccard: Piccard, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    published, installed = installed_code_hash(), upgrade(monkeypatch)
    report("version-1", installed)
    told = drifts(piccard, service)
    assert told["1"] == f"runs the installed code {installed[:12]}; it was published with {published[:12]}"
    assert told["2"].startswith("would run the installed code")
    # It is what a linked version is for: nothing to be mended.
    assert problems(service) == []


def test_routers_and_admission_of_either_folder(service: Service, piccard: Piccard, report: Report) -> None:
    report("router.2", OLD)
    report("admission", OLD)
    assert list(drifts(piccard, service)) == ["admission", "router.2"]
    assert [problem.partition(" ")[0] for problem in problems(service)] == ["admission", "router.2"]
    assert "router.2 runs code 000000000000" in piccard(service.home, "status").stdout


def test_a_process_that_tells_nothing_or_is_gone_is_not_said_to_differ(
    service: Service, piccard: Piccard, report: Report
) -> None:
    report("router", "")
    report("supervisor", OLD)
    live = LiveState(service.live_state, service.run_folder)
    live.writer("version-2").publish({"phase": "ready", "code_hash": OLD})
    live.close()
    assert drifts(piccard, service) == {}


def test_a_snapshot_differs_from_its_publication_alone(
    service: Service, piccard: Piccard, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    piccard(service.home, "publish", "scripted", "--runner=scripted", "--label=v3")
    published = read_version_file(service.version_folder(3)).hashes.code
    assert published == installed_code_hash()
    upgrade(monkeypatch)
    report("version-3", published or "")
    assert "3" not in drifts(piccard, service)


def test_a_snapshot_that_was_edited(service: Service, piccard: Piccard, report: Report) -> None:
    piccard(service.home, "publish", "scripted", "--runner=scripted", "--label=v3")
    report("version-3", OLD)
    assert "and its snapshot was published as" in drifts(piccard, service)["3"]


def test_a_linked_version_is_the_same_whatever_is_installed(
    service: Service, piccard: Piccard, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = ("publish", "scripted", "--runner=scripted", "--linked", "--label=v3")
    piccard(service.home, *publish)
    upgrade(monkeypatch)
    assert "published already, as version 3" in piccard(service.home, *publish).stdout


def test_a_version_that_cannot_be_read_is_passed_over(service: Service, piccard: Piccard) -> None:
    Path(service.version_folder(2) / "version.yaml").unlink()
    found = json.loads(piccard(service.home, "status", "--json").stdout)["versions"][1]
    assert (found["linked"], found["published_code"], found["drift"]) == (None, "", "")
