"""What a home keeps of versions that were retired."""

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from operated_service import OperatedService
from piccard.promote import promote
from piccard.retention import forget_retired
from piccard.retire import retire
from piccard_contract.home import version_owner
from piccard_contract.lifecycle import KEPT_RETIRED, VersionState
from piccard_contract.live_state import LiveState
from piccard_contract.process_lock import ProcessLock
from piccard_server import make_scripted_home


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OperatedService]:
    """A service whose server does not run, so that what is retired has ended at once."""
    monkeypatch.setattr("piccard.doctor.problems", lambda *_, **__: [])
    service = OperatedService(make_scripted_home(tmp_path / "home").home)
    yield service
    service.close()


def come_and_go(world: OperatedService, count: int) -> list[int]:
    """Publish and retire versions; their numbers."""
    numbers = []
    for _ in range(count):
        outcome = world.publish(f"v{world.store.read().next_version}")
        assert outcome is not None
        number = outcome.after["version"]
        # What its process would have left.
        world.service.process_lock(version_owner(number)).touch()
        world.service.operators_file(number).touch()
        live = LiveState(world.service.live_state, world.service.run_folder)
        live.writer(version_owner(number)).publish({"version": number})
        live.close()
        world.given_up.add(number)
        world.run(lambda op, number=number: retire(op, number, force=False, wait=0.0))
        numbers.append(number)
    return numbers


def traces(world: OperatedService, version: int) -> set[str]:
    """What there is of a version."""
    service, owner = world.service, version_owner(version)
    live = LiveState(service.live_state, service.run_folder)
    try:
        found = {
            "record": version in world.store.read().versions,
            "folder": service.version_folder(version).exists(),
            "lock": service.process_lock(owner).exists(),
            "operators": service.operators_file(version).exists(),
            "section": live.read(owner) is not None,
        }
    finally:
        live.close()
    return {name for name, there in found.items() if there}


def test_only_the_last_retired_are_kept(world: OperatedService) -> None:
    numbers = come_and_go(world, KEPT_RETIRED + 3)

    for number in numbers[:3]:
        assert traces(world, number) == set()
    for number in numbers[3:]:
        assert traces(world, number) == {"record", "folder", "lock", "operators", "section"}
    # A number is never used again.
    assert come_and_go(world, 1) == [numbers[-1] + 1]


def test_nothing_with_a_part_to_play_is_forgotten(world: OperatedService) -> None:
    ready = world.publish("v-ready")
    assert ready is not None
    world.run(lambda op: promote(op, 2))
    come_and_go(world, KEPT_RETIRED + 2)

    for number in (1, 2, ready.after["version"]):
        assert world.service.version_folder(number).exists()
        assert number in world.store.read().versions


def test_a_process_that_still_ends_keeps_its_traces(world: OperatedService) -> None:
    first = come_and_go(world, KEPT_RETIRED)[0]
    lock = ProcessLock(world.service.process_lock(version_owner(first)))
    lock.acquire()
    come_and_go(world, 2)
    assert "folder" in traces(world, first)
    lock.release()

    come_and_go(world, 1)
    assert traces(world, first) == set()


@pytest.mark.parametrize("at", range(8))
def test_killed_half_way_the_next_goes_on(world: OperatedService, at: int) -> None:
    first = come_and_go(world, KEPT_RETIRED + 1)[0]
    # One that is to be forgotten again, from its whole folder on.
    with world.store.change() as state:
        state.versions[first] = state.versions[max(state.versions)].model_copy(update={"label": world.labels[first]})
    world.service.version_folder(first).mkdir()
    for name in ("model.py", "version.yaml"):
        (world.service.version_folder(first) / name).touch()

    world.run(forget_retired, ("kill", at))
    assert world.run(forget_retired) in ([], [first])
    assert traces(world, first) == set()


def test_what_cannot_be_removed_is_told_and_fails_nothing(
    world: OperatedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = shutil.rmtree

    def refuse(path: Path, **options: bool) -> None:
        if path.parent == world.service.llm_folder:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    numbers = come_and_go(world, KEPT_RETIRED + 2)

    assert world.store.read().versions[numbers[0]].state is VersionState.RETIRED
    assert world.store.read().versions[numbers[-1]].state is VersionState.RETIRED
    assert world.service.version_folder(numbers[0]).exists()
