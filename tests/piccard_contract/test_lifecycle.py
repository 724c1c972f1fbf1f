"""The table of moves, and state.json as it is kept."""

from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from piccard_contract.lifecycle import (
    LOADED_STATES,
    MOVES,
    SERVING_STATES,
    STATE_MEANINGS,
    IllegalMoveError,
    ServiceState,
    VersionRecord,
    VersionState,
    now,
)

states = st.sampled_from(VersionState)


def service_with(state: VersionState) -> ServiceState:
    record = VersionRecord(state=state, label="v1", published_at=now(), changed_at=now())
    return ServiceState(service="deepseek", next_version=2, versions={1: record})


@given(states, states)
def test_only_moves_of_the_table(start: VersionState, to: VersionState) -> None:
    service = service_with(start)
    if to == start or to in MOVES[start]:
        service.move(1, to, "why")
        assert service.versions[1].state is to
        return
    with pytest.raises(IllegalMoveError, match="allowed: "):
        service.move(1, to)
    assert service.versions[1].state is start


@given(st.lists(states, max_size=12))
def test_a_retired_version_stays_retired(path: list[VersionState]) -> None:
    service = service_with(VersionState.STAGED)
    retired = False
    for to in path:
        try:
            service.move(1, to)
        except IllegalMoveError:
            continue
        assert not retired or to is VersionState.RETIRED
        retired = to is VersionState.RETIRED


def test_every_state_has_moves_and_can_be_reached() -> None:
    assert set(MOVES) == set(STATE_MEANINGS) == set(VersionState)
    assert set(VersionState) - {VersionState.STAGED} == set().union(*MOVES.values())
    assert SERVING_STATES < LOADED_STATES


def test_a_move_notes_its_reason_and_time() -> None:
    service = service_with(VersionState.LOADING)
    service.versions[1].changed_at = ""
    service.move(1, VersionState.FAILED, "out of memory")

    assert service.versions[1].reason == "out of memory"
    assert datetime.fromisoformat(service.versions[1].changed_at).tzinfo is not None


def test_loaded_versions_are_in_order() -> None:
    service = service_with(VersionState.STABLE)
    for number, state in ((10, VersionState.READY), (3, VersionState.RETIRED), (2, VersionState.DRAINING)):
        service.versions[number] = service_with(state).versions[1]

    assert service.loaded() == [1, 2, 10]


@given(states, st.integers(0, 99), st.none() | st.integers(1, 9))
def test_json_round_trip(state: VersionState, generation: int, canary: int | None) -> None:
    service = service_with(state).model_copy(update={"generation": generation, "canary": canary})

    assert ServiceState.model_validate_json(service.model_dump_json(by_alias=True)) == service
