"""`piccard revive` and doctor start what is dead and nobody starts."""

from collections.abc import Iterator
from typing import Any

import pytest
from fake_processes import FakeProcesses
from fake_triton import fake_probe
from piccard.agreement_checks import process_findings
from piccard.errors import OperationError
from piccard.operation import Operation
from piccard.revive import revive
from piccard.state_store import StateStore
from piccard.version_loading import move
from piccard_contract.home import Service
from piccard_contract.lifecycle import VersionState
from piccard_contract.live_state import LiveState
from piccard_contract.process_lock import ProcessLock
from piccard_contract.reports import SupervisorReport


@pytest.fixture
def server(service: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeProcesses]:
    monkeypatch.setattr("piccard.version_loading.probe_version", fake_probe)
    made = FakeProcesses(service, (1, 2))
    yield made
    made.close()


def operation(server: FakeProcesses | None, service: Service, *, dry_run: bool = False) -> Operation:
    control: Any = server
    return Operation(service, StateStore(service), control, dry_run, tell=lambda _: None)


def supervise(service: Service, given_up: dict[str, str]) -> ProcessLock:
    lock = ProcessLock(service.process_lock("supervisor"))
    lock.acquire()
    live = LiveState(service.live_state, service.run_folder)
    report = SupervisorReport(grpc="fake", given_up=given_up, details={"phase": "serving"})
    live.writer("supervisor").publish(report.model_dump(mode="json"))
    live.close()
    return lock


@pytest.mark.parametrize("owner", ["version-1", "version-2"])
def test_a_dead_version_is_started(server: FakeProcesses, service: Service, owner: str) -> None:
    server.die(owner)
    outcome = revive(operation(server, service), owner)
    assert outcome.changed
    assert server.lives(owner)
    assert f"revive {owner}" in service.audit_log.read_text()


@pytest.mark.parametrize("owner", ["admission", "router", "router_unary"])
def test_a_dead_step_is_rolled(server: FakeProcesses, service: Service, owner: str) -> None:
    server.die(owner)
    assert revive(operation(server, service), owner).changed
    assert server.lives(f"{owner}.2")


def test_a_failed_canary_is_probed_and_is_the_canary_again(server: FakeProcesses, service: Service) -> None:
    server.die("version-2")
    server.set_versions(service, service.llm, {1})
    move(StateStore(service), 2, VersionState.FAILED, "no memory")
    assert revive(operation(server, service), "version-2").changed
    record = StateStore(service).read().versions[2]
    assert (record.state, record.reason) == (VersionState.CANARY, "")


def test_without_a_name_everything_dead_is_started(server: FakeProcesses, service: Service) -> None:
    for owner in ("version-1", "router", "admission"):
        server.die(owner)
    assert revive(operation(server, service), None).message == "version-1, admission, router: started again"
    assert not revive(operation(server, service), None).changed


def test_what_lives_is_left_alone(server: FakeProcesses, service: Service) -> None:
    outcome = revive(operation(server, service), "router")
    assert (outcome.changed, outcome.message) == (False, "router is alive")
    assert server.calls == []


def test_dry_run_starts_nothing(server: FakeProcesses, service: Service) -> None:
    server.die("version-2")
    assert revive(operation(server, service, dry_run=True), None).changed
    assert not server.lives("version-2")


def test_what_cannot_be_revived_is_told(server: FakeProcesses, service: Service) -> None:
    with pytest.raises(OperationError, match=r"no process version-7.*version-1, version-2, admission"):
        revive(operation(server, service), "version-7")
    with pytest.raises(OperationError, match="no server runs"):
        revive(operation(None, service), "version-2")


def test_doctor_tells_who_starts_what_is_dead(server: FakeProcesses, service: Service) -> None:
    op = operation(server, service)
    assert list(process_findings(op)) == []
    for owner in ("version-2", "router"):
        server.die(owner)
    # Nobody looks after the server, so that a repair does.
    assert [finding.repair is not None for finding in process_findings(op)] == [True, True]
    lock = supervise(service, {"deepseek/router": "it died again"})
    alone, given_up = process_findings(op)
    assert alone.repair is None
    assert "is starting it again" in alone.remedy
    assert "it died again" in given_up.problem
    assert "piccard revive router" in given_up.remedy
    assert given_up.repair is not None
    given_up.repair()
    lock.release()
    assert server.lives("router.2")
