"""The state file: one writer a section, readers that never see half a report."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from piccard_contract import live_state
from piccard_contract.live_state import MAX_PAYLOAD, LiveState, LiveStateError
from piccard_contract.process_lock import ProcessLock

WRITE = """
import sys
from pathlib import Path
from piccard_contract.live_state import LiveState
from piccard_contract.process_lock import ProcessLock
path, run = Path(sys.argv[1]), Path(sys.argv[2])
lock = ProcessLock(run / "version-1.lock")
lock.acquire()
writer = LiveState(path, run).writer("version-1")
print("ready", flush=True)
number = 0
while True:
    number += 1
    # Length and content depend on the number, so that any mixture of two reports shows.
    writer.publish({"number": number, "copies": [number] * (number % 500)})
"""


@pytest.fixture
def state(tmp_path: Path) -> Iterator[LiveState]:
    live = LiveState(tmp_path / "state" / "live.state", tmp_path / "run")
    yield live
    live.close()


def held(state: LiveState, owner: str) -> ProcessLock:
    lock = ProcessLock(state.run_folder / f"{owner}.lock")
    lock.acquire()
    return lock


def test_a_reader_never_sees_half_a_report(state: LiveState) -> None:
    arguments = [sys.executable, "-c", WRITE, str(state.path), str(state.run_folder)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        seen: list[int] = []
        # On a busy machine writer and reader take turns of milliseconds, so a count of looks says little.
        while len(set(seen)) < 50:
            section = state.read("version-1")
            if section is None:
                continue
            number = section.data["number"]
            assert section.data["copies"] == [number] * (number % 500)
            assert section.pid == process.pid
            seen.append(number)
    finally:
        process.kill()
        process.wait()
    assert seen == sorted(seen)


def test_a_section_is_cleared_once_its_process_is_gone(state: LiveState) -> None:
    lock = held(state, "version-1")
    other = held(state, "version-2")
    state.writer("version-1").publish({"number": 1})
    state.writer("version-2").publish({"number": 2})
    with pytest.raises(LiveStateError, match="version-1 lives"):
        state.clear("version-1")
    lock.release()

    assert state.clear("version-1")
    assert not state.clear("version-1")
    assert state.read("version-1") is None
    assert [section.owner for section in state.sections()] == ["version-2"]
    # The next owner takes the free place.
    third = held(state, "version-3")
    state.writer("version-3").publish({"number": 3})
    assert [section.owner for section in state.sections()] == ["version-3", "version-2"]
    other.release()
    third.release()


def test_the_last_report_outlives_its_process(state: LiveState) -> None:
    arguments = [sys.executable, "-c", WRITE, str(state.path), str(state.run_folder)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    while (section := state.read("version-1")) is None:
        pass
    assert section.alive

    process.kill()
    process.wait()
    # Killed in the middle of a report, the section may be torn for good; then it counts as nothing.
    section = state.read("version-1")
    assert section is None or not section.alive


def begin_report(state: LiveState, owner: str) -> int:
    """Half of a report of `owner`, as a writer leaves it that has lost its processor; where its section begins."""
    state.writer(owner).publish({"value": 1})
    offset = next(
        state._offset(index) for index in range(live_state.SECTION_COUNT) if state._owner(state._offset(index))
    )
    start = offset + live_state._SECTION_HEADER.size
    state._map[start : start + 11] = b'{"value":2}'
    return start


def test_a_writer_that_waits_for_a_processor_is_waited_for(state: LiveState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_state, "READ_PATIENCE", 60.0)
    lock = held(state, "version-1")
    start = begin_report(state, "version-1")
    # The first look finds the report torn; it is whole again while the reader waits.
    monkeypatch.setattr(live_state.time, "sleep", lambda _: state._map.__setitem__(start + 9, ord("1")))

    section = state.read("version-1")
    lock.release()
    assert section is not None
    assert section.data == {"value": 1}


def test_what_a_dead_writer_left_torn_is_not_waited_for(state: LiveState, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = held(state, "version-1")
    begin_report(state, "version-1")
    lock.release()
    monkeypatch.setattr(live_state.time, "sleep", lambda _: pytest.fail("it waits"))

    assert state.read("version-1") is None


def test_a_writer_that_is_stuck_is_not_waited_for_for_ever(state: LiveState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_state, "READ_PATIENCE", 0.01)
    lock = held(state, "version-1")
    begin_report(state, "version-1")

    assert state.read("version-1") is None
    lock.release()


def test_a_new_process_does_not_inherit_a_report(state: LiveState) -> None:
    lock = held(state, "version-1")
    state.writer("version-1").publish({"phase": "ready"})
    lock.release()
    lock = held(state, "version-1")

    assert state.read("version-1") is not None
    state.writer("version-1")
    assert state.read("version-1") is None
    lock.release()


def test_a_report_of_another_process_is_not_alive(state: LiveState, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = held(state, "version-1")
    monkeypatch.setattr("os.getpid", lambda: 1)
    state.writer("version-1").publish({"phase": "ready"})
    section = state.read("version-1")
    lock.release()

    assert section is not None
    assert not section.alive


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.sampled_from(["router", "admission", "version-1", "version-12"]), st.integers()), max_size=8)
)
def test_each_owner_has_its_last_report(
    tmp_path_factory: pytest.TempPathFactory, reports: list[tuple[str, int]]
) -> None:
    folder = tmp_path_factory.mktemp("state")
    live = LiveState(folder / "live.state", folder / "run")
    writers = {owner: live.writer(owner) for owner, _ in reports}
    for owner, value in reports:
        writers[owner].publish({"value": value})

    expected = dict(reports)
    assert {section.owner: section.data["value"] for section in live.sections()} == expected
    assert {section.owner for section in live.sections("version-")} == {o for o in expected if o.startswith("version-")}
    assert live.read("version-9") is None
    live.close()


def test_two_maps_see_each_other(state: LiveState) -> None:
    other = LiveState(state.path, state.run_folder)
    state.writer("router").publish({"value": 1})
    section = other.read("router")
    other.close()

    assert section is not None
    assert section.data == {"value": 1}


def test_a_dead_owners_section_is_taken(state: LiveState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_state, "SECTION_COUNT", 2)
    locks = [held(state, owner) for owner in ("version-1", "version-2")]
    for owner in ("version-1", "version-2"):
        state.writer(owner).publish({})
    with pytest.raises(LiveStateError, match="no free section"):
        state.writer("version-3")

    locks[0].release()
    state.writer("version-3").publish({"value": 3})

    assert [section.owner for section in state.sections()] == ["version-3", "version-2"]
    locks[1].release()


def test_a_report_too_large_is_refused_and_the_last_one_kept(state: LiveState) -> None:
    writer = state.writer("router")
    writer.publish({"value": 1})
    with pytest.raises(LiveStateError, match="do not fit"):
        writer.publish({"value": "x" * MAX_PAYLOAD})

    section = state.read("router")
    assert section is not None
    assert section.data == {"value": 1}


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "live.state").write_bytes(b"something else")
    with pytest.raises(LiveStateError, match="not a state file"):
        LiveState(tmp_path / "live.state", tmp_path)


@pytest.mark.parametrize("owner", ["", "x" * 65])
def test_owner_names_have_a_length(state: LiveState, owner: str) -> None:
    with pytest.raises(LiveStateError, match="1 to 64"):
        state.writer(owner)
