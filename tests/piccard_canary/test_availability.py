"""Which versions may serve."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from canary_fakes import HandClock
from piccard_canary.availability import Availability, LoadedVersion
from piccard_contract.home import Service, version_owner
from piccard_contract.lifecycle import ServiceState, VersionRecord, VersionState
from piccard_contract.live_state import LiveState
from piccard_contract.process_lock import ProcessLock
from piccard_contract.reports import VersionReport


class Home:
    """A service whose versions are this process."""

    def __init__(self, folder: Path) -> None:
        self.service = Service(folder)
        self.live = LiveState(self.service.live_state, self.service.run_folder)
        self.clock = HandClock()
        self.availability = Availability(self.service, self.live, clock=self.clock)
        self.locks: dict[int, ProcessLock] = {}

    def load(self, version: int, phase: str = "ready", **report: Any) -> None:
        self.locks[version] = ProcessLock(self.service.process_lock(version_owner(version)))
        self.locks[version].acquire()
        told = VersionReport.model_validate({"version": version, "phase": phase, **report})
        self.live.writer(version_owner(version)).publish(told.model_dump())

    def write_states(self, stable: int | None = None, previous: int | None = None, **states: VersionState) -> None:
        records = {
            int(name.removeprefix("v")): VersionRecord(state=state, label="v", published_at="", changed_at="")
            for name, state in states.items()
        }
        state = ServiceState(service="deepseek", stable=stable, previous=previous, versions=records)
        new = self.service.state_json.with_suffix(".new")
        new.write_text(state.model_dump_json(by_alias=True))
        os.replace(new, self.service.state_json)

    def previous(self, stable: int | None) -> int | None:
        self.clock.now += 1
        return self.availability.snapshot().previous(stable)

    def ready(self) -> set[int]:
        self.clock.now += 1
        return set(self.availability.snapshot().ready)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path)
    yield made
    for lock in made.locks.values():
        lock.release()
    made.live.close()


def test_a_version_serves_while_its_process_lives_and_is_ready(home: Home) -> None:
    assert home.ready() == set()
    home.load(1)
    home.load(2, "loading")
    home.load(3, "failed")
    assert home.ready() == {1}

    home.locks[1].release()
    assert home.ready() == set()


def test_other_processes_are_no_versions(home: Home) -> None:
    home.load(1)
    lock = ProcessLock(home.service.process_lock("router"))
    lock.acquire()
    home.live.writer("router").publish({"in_flight": {}})

    assert home.ready() == {1}
    lock.release()


def test_state_json_has_its_say(home: Home) -> None:
    for version in (1, 2, 3, 4):
        home.load(version)
    assert home.ready() == {1, 2, 3, 4}
    assert home.availability.snapshot().expected == {1, 2, 3, 4}

    home.write_states(v1=VersionState.STABLE, v2=VersionState.PROBING, v3=VersionState.DRAINING, v5=VersionState.READY)
    assert home.ready() == {1}
    assert home.availability.snapshot().expected == {1, 5}

    home.write_states(v1=VersionState.STABLE, v2=VersionState.READY)
    assert home.ready() == {1, 2}


def test_previous_is_told_while_it_may_serve(home: Home) -> None:
    assert home.previous(2) is None
    for state, told in (
        (VersionState.PREVIOUS, 1),
        (VersionState.FAILED, None),
        # Loaded again, before it has its role back.
        (VersionState.READY, 1),
        (VersionState.DRAINING, None),
    ):
        home.write_states(stable=2, previous=1, v1=state, v2=VersionState.STABLE)
        assert home.previous(2) == told
    home.write_states(stable=2, v1=VersionState.READY, v2=VersionState.STABLE)
    assert home.previous(2) is None


def test_previous_between_the_two_halves_of_a_rollback(home: Home) -> None:
    home.write_states(stable=2, previous=1, v1=VersionState.PREVIOUS, v2=VersionState.STABLE)
    assert (home.previous(1), home.previous(2)) == (2, 1)
    home.write_states(stable=1, previous=2, v1=VersionState.STABLE, v2=VersionState.PREVIOUS)
    # The link still names the version that fails.
    assert home.previous(2) == 1
    assert home.previous(1) == 2
    assert home.previous(None) == 1


def test_a_broken_state_json_changes_nothing(home: Home) -> None:
    home.load(1)
    home.load(2)
    home.write_states(v1=VersionState.STABLE)
    assert home.ready() == {1}

    home.service.state_json.write_text("{")
    assert home.ready() == {1}
    home.service.state_json.unlink()
    assert home.ready() == {1}


def test_a_look_is_good_for_a_moment(home: Home) -> None:
    assert home.ready() == set()
    home.load(1)
    assert home.availability.snapshot().ready == {}

    home.clock.now += 0.051
    assert home.availability.snapshot().ready == {1: LoadedVersion(1, os.getpid())}


def test_who_looks_without_a_request_keeps_none_from_the_news(home: Home) -> None:
    assert home.ready() == set()
    home.clock.now += 0.051
    assert home.availability.look().ready == {}
    home.load(1)

    assert set(home.availability.snapshot().ready) == {1}


def test_hashes_and_process_are_told(home: Home) -> None:
    home.load(1, tokenizer_hash="t", template_hash="c")

    assert home.availability.snapshot().ready == {1: LoadedVersion(1, os.getpid(), "t", "c")}
    assert home.availability.process(1) == os.getpid()
    assert home.availability.process(2) is None


@pytest.mark.parametrize(
    ("report", "load"),
    [
        ({"load": 0.25, "total_blocks": 100}, 0.25),
        # Of an older version the cache tells.
        ({"free_blocks": 25, "total_blocks": 100}, 0.75),
        ({}, 0.0),
    ],
)
def test_load_and_tokenizer_are_told(home: Home, report: dict[str, Any], load: float) -> None:
    home.load(1, bytes_per_token=2.5, max_model_len=77, **report)
    told = home.availability.snapshot().ready[1]
    assert (told.load, told.bytes_per_token, told.max_model_len) == (load, 2.5, 77)
