"""Commands that fail or are killed with kill -9 at any of their writes: what a service is always agrees again."""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from fake_triton import BAD, fake_probe
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from operated_service import Fault, OperatedService
from piccard import version_loading
from piccard.canary import canary_off, canary_set
from piccard.doctor import doctor
from piccard.errors import OperationError
from piccard.operation import Operation
from piccard.promote import promote
from piccard.repository import point_stable, write_stable_config
from piccard.retire import retire
from piccard.revive import revive
from piccard.rollback import rollback
from piccard_contract.lifecycle import MOVE_CAUSES, ServiceState, VersionState
from piccard_server import make_scripted_home


@pytest.fixture
def template(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home to copy, and doubles of what asks a real server."""
    monkeypatch.setattr(version_loading, "probe_version", fake_probe)
    # Ports and packages of the machine that tests run on are another test's.
    monkeypatch.setattr("piccard.doctor.problems", lambda *_, **__: [])
    make_scripted_home(tmp_path / "template")
    return tmp_path / "template"


@pytest.fixture
def new_world(template: Path, tmp_path: Path) -> Callable[[], OperatedService]:
    """Makes a service of its own, with stable 1 and canary 2, on a running server."""

    def make() -> OperatedService:
        home = tmp_path / "home"
        shutil.rmtree(home, ignore_errors=True)
        shutil.copytree(template, home, symlinks=True)
        world = OperatedService(home)
        world.restart()
        return world

    return make


def promote_2(world: OperatedService, fault: Fault, repairs: bool) -> None:
    world.run(lambda op: promote(op, 2), fault, repairs=repairs)


def promote_and_roll_back(world: OperatedService, fault: Fault, repairs: bool) -> None:
    world.run(lambda op: promote(op, 2))
    world.run(rollback, fault, repairs=repairs)


def publish_good(world: OperatedService, fault: Fault, repairs: bool) -> None:
    world.publish("good", fault, repairs=repairs)


def publish_bad(world: OperatedService, fault: Fault, repairs: bool) -> None:
    world.publish(f"{BAD}-1", fault, repairs=repairs)


def publish_until_there(world: OperatedService, fault: Fault, repairs: bool) -> None:
    world.publish("good", fault, repairs=repairs)
    passed = world.points.passed
    world.server.finish_streams()
    assert world.publish("good") is not None
    world.points.passed = passed


def publish_without_server(world: OperatedService, fault: Fault, repairs: bool) -> None:
    world.server.kill()
    world.publish("good", fault, repairs=repairs)
    passed = world.points.passed
    world.restart()
    world.check()
    world.points.passed = passed


def retire_ready(world: OperatedService, fault: Fault, repairs: bool) -> None:
    world.run(canary_off)
    world.given_up.add(2)
    world.run(lambda op: retire(op, 2, force=False, wait=0.0), fault, repairs=repairs)
    world.server.finish_streams()
    world.look_after()
    world.check()


def retire_previous(world: OperatedService, fault: Fault, repairs: bool) -> None:
    world.run(lambda op: promote(op, 2))
    world.given_up.add(1)
    world.run(lambda op: retire(op, 1, force=True, wait=0.0), fault, repairs=repairs)


def another_canary(world: OperatedService, fault: Fault, repairs: bool) -> None:
    world.publish("good")
    world.run(lambda op: canary_set(op, 3, 0.5), fault, repairs=repairs)


def previous_as_canary(world: OperatedService, fault: Fault, repairs: bool) -> None:
    world.run(lambda op: promote(op, 2))
    world.run(lambda op: canary_set(op, 1, 0.5), fault, repairs=repairs)


def end_canary(world: OperatedService, fault: Fault, repairs: bool) -> None:
    world.run(canary_off, fault, repairs=repairs)


def restart(world: OperatedService, fault: Fault, repairs: bool) -> None:
    world.publish("good")
    world.restart(fault)
    world.check()


def restart_with_work(world: OperatedService, fault: Fault, repairs: bool) -> None:
    world.server.kill()
    world.publish("good")
    world.publish(f"{BAD}-1")
    world.restart(fault)
    world.check()


def publish_unloadable(world: OperatedService, fault: Fault, repairs: bool) -> None:
    world.server.broken.add(3)
    world.publish(f"{BAD}-1", fault, repairs=repairs)
    world.server.broken.clear()


def retire_failed(world: OperatedService, fault: Fault, repairs: bool) -> None:
    world.publish(f"{BAD}-1")
    world.given_up.add(3)
    world.run(lambda op: retire(op, 3, force=False, wait=0.0), fault, repairs=repairs)


def retire_staged(world: OperatedService, fault: Fault, repairs: bool) -> None:
    world.server.kill()
    world.publish("good")
    world.given_up.add(3)
    world.run(lambda op: retire(op, 3, force=False, wait=0.0), fault, repairs=repairs)


def stable_dies(world: OperatedService, fault: Fault, repairs: bool) -> None:
    world.dies(1, fault, for_good=False, repairs=repairs)
    world.check()


def give_up(world: OperatedService, version: int, fault: Fault, repairs: bool) -> None:
    """Its process dies and cannot be started again, until somebody has mended it; then `revive` starts it."""
    world.dies(version, fault, for_good=True, repairs=repairs)
    assert world.store.read().versions[version].state is VersionState.FAILED
    world.check()
    passed = world.points.passed
    world.server.broken.clear()
    assert world.run(lambda op: revive(op, f"version-{version}")) is not None
    world.points.passed = passed


def ready_given_up(world: OperatedService, fault: Fault, repairs: bool) -> None:
    world.run(canary_off)
    give_up(world, 2, fault, repairs)


def canary_given_up(world: OperatedService, fault: Fault, repairs: bool) -> None:
    give_up(world, 2, fault, repairs)
    assert world.store.read().versions[2].state is VersionState.CANARY


def previous_given_up(world: OperatedService, fault: Fault, repairs: bool) -> None:
    world.run(lambda op: promote(op, 2))
    give_up(world, 1, fault, repairs)
    assert world.store.read().versions[1].state is VersionState.PREVIOUS


def revive_canary(world: OperatedService, fault: Fault, repairs: bool) -> None:
    world.dies(2, for_good=True)
    world.server.broken.clear()
    world.run(lambda op: revive(op, "version-2"), fault, repairs=repairs)


def revive_stable(world: OperatedService, fault: Fault, repairs: bool) -> None:
    world.dies(1, for_good=True)
    world.server.broken.clear()
    world.run(lambda op: revive(op, None), fault, repairs=repairs, may_disagree=True)
    assert 1 not in world.lost


def stable_not_started(world: OperatedService, fault: Fault, repairs: bool) -> None:
    world.server.broken.add(1)
    world.lost.add(1)
    world.restart(fault)
    assert world.store.read().versions[1].state is VersionState.FAILED
    passed = world.points.passed
    world.server.broken.clear()
    world.restart()
    world.check()
    assert 1 not in world.lost
    world.points.passed = passed


def start_failed_stable(world: OperatedService, fault: Fault, repairs: bool) -> None:
    world.server.broken.add(1)
    world.lost.add(1)
    world.restart()
    world.server.broken.clear()
    world.restart(fault)
    if world.points.control_failed:
        # What the server did then is not known, and stable has failed again; the next start begins anew.
        passed = world.points.passed
        world.restart()
        world.points.passed = passed
    world.check()
    assert 1 not in world.lost


COMMANDS = [
    promote_2,
    promote_and_roll_back,
    publish_good,
    publish_bad,
    publish_until_there,
    publish_without_server,
    retire_ready,
    retire_previous,
    another_canary,
    previous_as_canary,
    end_canary,
    restart,
    restart_with_work,
]

# What goes wrong with a version, and what is done about it.
TROUBLES = [
    retire_staged,
    stable_dies,
    ready_given_up,
    canary_given_up,
    previous_given_up,
    revive_canary,
    revive_stable,
    stable_not_started,
    start_failed_stable,
]

# Their writes are those of commands above.
ALIKE = [publish_unloadable, retire_failed]


@pytest.mark.parametrize("kind", ["kill", "fail"])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__)
def test_fault_at_every_write(
    new_world: Callable[[], OperatedService],
    command: Callable[[OperatedService, Fault, bool], None],
    kind: str,
) -> None:
    """A kill is followed by a repair, or at every other write by a restart of the server."""
    at = 0
    while reaches(new_world, command, (kind, at), repairs=at % 2 == 0):
        at += 1
    assert at >= 2, "a command that writes nothing proves nothing"


@pytest.mark.parametrize("command", TROUBLES, ids=lambda command: command.__name__)
def test_fault_in_trouble(
    new_world: Callable[[], OperatedService], command: Callable[[OperatedService, Fault, bool], None]
) -> None:
    """The same where a version died, cannot be started or never was; kills and failures take turns."""
    at = 0
    while reaches(new_world, command, ("fail" if at % 2 else "kill", at), repairs=at % 4 < 2):
        at += 1
    assert at >= 2, "a command that writes nothing proves nothing"


def reaches(
    new_world: Callable[[], OperatedService],
    command: Callable[[OperatedService, Fault, bool], None],
    fault: tuple[str, int],
    repairs: bool,
) -> bool:
    """Whether the command came to the point of the fault."""
    world = new_world()
    try:
        command(world, fault, repairs)
        return len(world.points.passed) > fault[1]
    finally:
        world.close()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__)
@pytest.mark.parametrize("state_only", [True, False])
def test_command_upon_an_interrupted_promotion(
    new_world: Callable[[], OperatedService],
    command: Callable[[OperatedService, Fault, bool], None],
    state_only: bool,
) -> None:
    """Nobody repaired: whatever is done next, what the link names stays loaded."""
    world = new_world()
    try:
        world.run(lambda op: promote(op, 2))
        point_stable(world.service, 1)
        if state_only:
            write_stable_config(world.service, 1)
        with world.armed(None), pytest.MonkeyPatch.context() as patch:
            patch.setattr(world, "check", lambda: None)
            patch.setattr(world, "check_disk", lambda: None)
            command(world, None, True)
            world.check_served()
        world.recover(repairs=True)
        world.check()
    finally:
        world.close()


def test_every_move_is_walked(new_world: Callable[[], OperatedService], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without faults the commands above make every move of the table; one takes a full disk."""
    walked: set[tuple[VersionState, VersionState]] = set()
    move = ServiceState.move

    def noted(state: ServiceState, version: int, to: VersionState, reason: str = "") -> None:
        found = state.versions[version].state
        move(state, version, to, reason)
        if found != to:
            walked.add((found, to))

    monkeypatch.setattr(ServiceState, "move", noted)
    for command in COMMANDS + TROUBLES + ALIKE:
        world = new_world()
        try:
            command(world, None, True)
        finally:
            world.close()
    assert set(MOVE_CAUSES) - walked == {(VersionState.STAGED, VersionState.FAILED)}
    fail_to_begin_a_load(new_world)
    assert walked == set(MOVE_CAUSES)


def fail_to_begin_a_load(new_world: Callable[[], OperatedService]) -> None:
    world = new_world()
    try:
        assert world.publish("good") is not None
        writes = [at for at, name in enumerate(world.points.passed) if name.endswith(".tmp") and "state.json" in name]
    finally:
        world.close()
    world = new_world()
    try:
        # The first write says that it is staged, the second that it is being loaded.
        assert world.publish("good", ("fail", writes[1])) is None
        record = world.store.read().versions[3]
        assert record.state is VersionState.FAILED
        assert os.strerror(errno.ENOSPC) in record.reason
    finally:
        world.close()


def test_retire_keeps_what_the_link_names(new_world: Callable[[], OperatedService]) -> None:
    """State says that 2 is stable and 1 previous, requests still go to 1: not even --force ends it."""
    world = new_world()
    try:
        world.run(lambda op: promote(op, 2))
        point_stable(world.service, 1)
        with pytest.raises(OperationError, match=r"requests still go to version 1.*doctor --repair"):
            retire(world.operation(), 1, force=True, wait=0.0)
        world.check_served()
        world.recover(repairs=True)
        world.given_up.add(1)
        assert world.run(lambda op: retire(op, 1, force=True, wait=0.0)) is not None
    finally:
        world.close()


# What happens to a command, and at which of its points; few commands pass more than 25.
faults = st.none() | st.tuples(st.sampled_from(["kill", "fail"]), st.integers(0, 12) | st.integers(0, 25))


class LifeOfVersions(RuleBasedStateMachine):
    """A home, its server, and operators whose commands end anywhere."""

    template: ClassVar[Path]

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="piccard_life_"))
        shutil.copytree(self.template, self.folder / "home", symlinks=True)
        self.world = OperatedService(self.folder / "home")
        self.count = 0

    def teardown(self) -> None:
        self.world.close()
        shutil.rmtree(self.folder)

    @initialize(another=st.booleans())
    def first_start(self, another: bool) -> None:
        self.world.restart()
        self.world.check()
        if another:
            self.world.publish("good-0")

    @rule(fault=faults, bad=st.booleans(), repairs=st.booleans())
    def publish(self, fault: Fault, bad: bool, repairs: bool) -> None:
        self.count += 1
        self.world.publish(f"{BAD if bad else 'good'}-{self.count}", fault, repairs=repairs)

    @precondition(lambda self: self.count)
    @rule(fault=faults, repairs=st.booleans(), data=st.data())
    def publish_again(self, fault: Fault, repairs: bool, data: st.DataObject) -> None:
        labels = sorted({label for label in self.world.labels.values() if label.startswith((BAD, "good"))})
        if labels:
            self.world.publish(data.draw(st.sampled_from(labels)), fault, repairs=repairs)

    @rule(fault=faults, repairs=st.booleans(), data=st.data())
    def promote(self, fault: Fault, repairs: bool, data: st.DataObject) -> None:
        version = self.version(data)
        outcome = self.run(lambda op: promote(op, version), fault, repairs)
        assert outcome is None or self.world.store.read().stable == version

    @rule(fault=faults, repairs=st.booleans())
    def rollback(self, fault: Fault, repairs: bool) -> None:
        self.run(rollback, fault, repairs)

    @rule(force=st.booleans(), fault=faults, repairs=st.booleans(), data=st.data())
    def retire(self, force: bool, fault: Fault, repairs: bool, data: st.DataObject) -> None:
        version = self.version(data)
        baking = self.world.store.read().previous == version and not force
        if not baking:
            self.world.given_up.add(version)
        outcome = self.run(lambda op: retire(op, version, force=force, wait=0.0), fault, repairs)
        assert outcome is None or not baking

    @rule(ratio=st.sampled_from([0.0, 0.1, 1.0]), fault=faults, repairs=st.booleans(), data=st.data())
    def canary_set(self, ratio: float, fault: Fault, repairs: bool, data: st.DataObject) -> None:
        version = self.version(data)
        self.run(lambda op: canary_set(op, version, ratio), fault, repairs)

    @rule(fault=faults, repairs=st.booleans())
    def canary_off(self, fault: Fault, repairs: bool) -> None:
        self.run(canary_off, fault, repairs)

    @precondition(lambda self: self.world.living())
    @rule(for_good=st.booleans(), fault=faults, repairs=st.booleans(), data=st.data())
    def dies(self, for_good: bool, fault: Fault, repairs: bool, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(sorted(self.world.living())), label="version")
        self.world.dies(version, fault, for_good=for_good, repairs=repairs)
        self.world.server.broken.clear()
        if self.world.stable_is_lost():
            self.world.run(lambda op: revive(op, None), fault, repairs=repairs, may_disagree=True)
        if self.world.stable_is_lost():
            assert self.run(lambda op: revive(op, None), None, repairs) is not None
        self.world.check()
        assert not self.world.stable_is_lost()

    @rule(alone=st.booleans(), fault=faults, repairs=st.booleans(), data=st.data())
    def revive(self, alone: bool, fault: Fault, repairs: bool, data: st.DataObject) -> None:
        name = f"version-{self.version(data)}" if alone else None
        self.run(lambda op: revive(op, name), fault, repairs)

    @rule()
    def repair(self) -> None:
        self.run(lambda op: doctor(op, repair=True), None, True)

    @rule()
    def streams_end(self) -> None:
        self.world.server.finish_streams()
        self.world.look_after()
        self.world.check()

    @rule(fault=faults)
    def restart(self, fault: Fault) -> None:
        self.world.restart(fault)
        self.world.check()

    @rule()
    def stop(self) -> None:
        self.world.server.kill()

    def version(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.world.store.read().versions)), label="version")

    def run(self, command: Callable[[Operation], object], fault: Fault, repairs: bool) -> object:
        return self.world.run(command, fault, repairs=repairs)


def test_life_of_versions(template: Path) -> None:
    LifeOfVersions.template = template
    run_state_machine_as_test(
        LifeOfVersions,
        settings=settings(
            max_examples=25, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
