"""A switch that fails half way leaves everything as it was, and says so in the audit log."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from operations import operation_of
from piccard import stable_switch
from piccard.errors import OperationError
from piccard.promote import promote
from piccard.repository import configured_versions, stable_target
from piccard.stable_switch import switched
from piccard.state_store import StateStore
from piccard_contract.home import Service
from piccard_contract.lifecycle import ServiceState, VersionRecord, VersionState, now


@pytest.mark.parametrize("step", ["_end_canary", "write_stable_config", "point_stable"])
def test_failed_step_undoes_those_before(service: Service, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    before = StateStore(service).read()
    policy = service.policy_file.read_text()
    original = getattr(stable_switch, step)
    calls = []

    def fail(*arguments: object) -> None:
        calls.append(arguments)
        if len(calls) == 1:
            raise OSError("no space left on device")
        original(*arguments)

    monkeypatch.setattr(stable_switch, step, fail)
    with pytest.raises(OSError, match="no space left"):
        promote(operation_of(service), 2)

    after = StateStore(service).read()
    assert after.model_copy(update={"generation": before.generation}) == before
    assert service.policy_file.read_text() == policy
    assert stable_target(service) == 1
    assert configured_versions(service) == [1]
    assert json.loads(service.audit_log.read_text().splitlines()[-1])["failed"] == "no space left on device"


def test_interrupted_switch_is_finished_by_the_same_command(service: Service) -> None:
    with StateStore(service).change() as state:
        for field, value in switched(state, 2, "").__dict__.items():
            setattr(state, field, value)
    assert stable_target(service) == 1
    assert promote(operation_of(service), 2).changed
    assert stable_target(service) == 2
    assert configured_versions(service) == [2]


@given(st.lists(st.integers(1, 4), max_size=12))
def test_roles_and_states_agree_after_any_sequence(promotions: list[int]) -> None:
    record = VersionRecord(state=VersionState.READY, label="x", published_at=now(), changed_at=now())
    state = ServiceState(service="deepseek", versions={n: record.model_copy() for n in range(1, 5)})
    for version in promotions:
        state = switched(state, version, "")
    named = {state.stable: VersionState.STABLE, state.previous: VersionState.PREVIOUS}
    for number, found in state.versions.items():
        assert found.state is named.get(number, VersionState.READY)
    if promotions:
        assert state.stable == promotions[-1]


def test_failed_stable_version_can_be_left(service: Service) -> None:
    with StateStore(service).change() as state:
        state.move(1, VersionState.FAILED, "out of memory")
    promote(operation_of(service), 2)
    state = StateStore(service).read()
    assert (state.stable, state.previous) == (2, 1)
    assert state.versions[1].state is VersionState.FAILED


@pytest.mark.parametrize("found", [VersionState.STAGED, VersionState.FAILED, VersionState.RETIRED])
def test_only_a_version_that_serves_can_become_stable(service: Service, found: VersionState) -> None:
    with StateStore(service).change() as state:
        state.versions[2].state = found
    with pytest.raises(OperationError, match=f"version 2 is {found}"):
        promote(operation_of(service), 2)
