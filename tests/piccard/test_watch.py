"""What dies is started again by the right calls, with pauses, and given up after too many that were no use."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_processes import FakeProcesses
from piccard import watch as module
from piccard.policy_store import update_policy
from piccard.revival_counts import RevivalCounts
from piccard.state_store import StateStore
from piccard.version_loading import move, roll
from piccard.watch import Watch
from piccard_contract.home import Service
from piccard_contract.lifecycle import VersionState


class Scene:
    """A watch over a double of a server, whose clock the test moves."""

    def __init__(self, service: Service, limit: int = 3) -> None:
        self.service = service
        self.store = StateStore(service)
        self.server = FakeProcesses(service, (1, 2))
        self.now = 1000.0
        self.told: list[str] = []
        self.counts = RevivalCounts()
        control: Any = self.server
        self.watch = Watch(
            control, self.told.append, self.counts, threading.Event(), limit=limit, clock=lambda: self.now
        )
        self.watch.look([service])

    def until(self, happened: Callable[[], object], step: float = 0.0) -> None:
        """Look until something has happened; each look moves the clock by `step`."""
        deadline = time.monotonic() + 30
        while not happened():
            assert time.monotonic() < deadline, self.told
            self.now += step
            self.watch.look([self.service])
            self.watch.retire_drained([self.service])
            time.sleep(0.002)

    def dies(self, owner: str) -> None:
        self.server.die(owner)

    def state_of(self, version: int) -> VersionState:
        return self.store.read().versions[version].state


@pytest.fixture
def scene(service: Service) -> Iterator[Scene]:
    made = Scene(service)
    yield made
    made.server.close()


def test_a_version_beside_another_is_dropped_and_added(scene: Scene) -> None:
    scene.dies("version-2")
    scene.until(lambda: scene.server.lives("version-2"))
    assert scene.server.calls == [(scene.service.llm, (1,)), (scene.service.llm, (1, 2))]
    scene.until(lambda: scene.counts.by_process() == {"deepseek/version-2": 1})


def test_the_only_version_is_unloaded_and_loaded(scene: Scene) -> None:
    move(scene.store, 2, VersionState.FAILED)
    scene.server.set_versions(scene.service, scene.service.llm, {1})
    scene.server.calls.clear()
    scene.dies("version-1")
    scene.until(lambda: scene.server.lives("version-1"))
    assert scene.server.calls[:2] == [(scene.service.llm, ()), (scene.service.llm, (1,))]


@pytest.mark.parametrize("owner", ["admission", "router", "router_unary"])
def test_a_step_is_rolled_to_its_other_folder_and_back(scene: Scene, owner: str) -> None:
    scene.dies(owner)
    scene.until(lambda: scene.server.lives(f"{owner}.2"))
    scene.dies(f"{owner}.2")
    # Both count as deaths of the same step, so the second start waits.
    scene.until(lambda: scene.watch.waiting() == {f"deepseek/{owner}": 1.0})
    scene.until(lambda: scene.server.lives(owner), step=0.1)
    scene.until(lambda: scene.counts.by_process() == {f"deepseek/{owner}": 2})


def test_a_dead_step_is_rolled_also_where_a_newer_server_does_not_call_it_ready(scene: Scene) -> None:
    scene.dies("router")
    scene.server.ready.discard((scene.service.router, 1))
    scene.until(lambda: scene.server.lives("router.2"))
    scene.until(lambda: scene.server.ready_versions(scene.service.router) == [2])


def test_a_roll_that_was_cut_short_is_finished(scene: Scene) -> None:
    service, server = scene.service, scene.server
    server.set_versions(service, service.router, {1, 2})
    scene.dies("router")
    scene.until(lambda: server.ready_versions(service.router) == [2])
    assert server.lives("router.2")
    server.set_versions(service, service.router, {1, 2})
    for owner in ("router", "router.2"):
        scene.dies(owner)
    control: Any = server
    assert roll(control, service, service.router, dead=1) == 2
    assert server.lives("router.2")
    assert server.ready_versions(service.router) == [2]


def test_what_was_let_go_is_left_alone(scene: Scene) -> None:
    move(scene.store, 2, VersionState.READY)
    move(scene.store, 2, VersionState.DRAINING)
    scene.server.set_versions(scene.service, scene.service.llm, {1})
    scene.server.calls.clear()
    scene.until(lambda: scene.state_of(2) is VersionState.RETIRED)
    scene.watch.look([scene.service])
    assert scene.server.calls == []
    assert scene.counts.by_process() == {}


def test_a_version_that_cannot_be_started_is_given_up_and_fails(scene: Scene) -> None:
    scene.server.broken[scene.service.llm] = "no memory"
    scene.dies("version-2")
    scene.until(lambda: scene.state_of(2) is VersionState.FAILED, step=0.1)
    reason = "it could not be started 3 times in a row: no memory"
    assert scene.store.read().versions[2].reason == reason
    assert scene.watch.given_up() == {"deepseek/version-2": reason}
    assert scene.counts.by_process() == {"deepseek/version-2": 3}
    # Pauses of one and two seconds lay between the three.
    assert scene.now - 1000.0 >= 3.0
    assert "`piccard revive version-2` tries again" in scene.told[-1]


def test_stable_keeps_its_role_until_it_is_another(scene: Scene) -> None:
    scene.server.broken[scene.service.llm] = "no memory"
    scene.dies("version-1")
    scene.until(lambda: scene.watch.given_up(), step=0.1)
    assert scene.state_of(1) is VersionState.STABLE
    with scene.store.change() as state:
        state.move(1, VersionState.PREVIOUS)
        state.move(2, VersionState.STABLE)
        state.stable, state.canary, state.previous = 2, None, 1
    scene.until(lambda: scene.state_of(1) is VersionState.FAILED)


def test_one_that_always_dies_is_given_up(scene: Scene) -> None:
    for _ in range(3):
        scene.dies("router")
        scene.until(lambda: scene.server.lives("router.2"), step=0.1)
        scene.dies("router.2")
        scene.until(lambda: scene.server.lives("router") or scene.watch.given_up(), step=0.1)
        if scene.watch.given_up():
            break
    assert "died again within 300 s of each of 3 starts" in scene.watch.given_up()["deepseek/router"]


def test_one_that_a_person_started_is_not_given_up_any_more(scene: Scene) -> None:
    scene.server.broken[scene.service.llm] = "no memory"
    scene.dies("version-1")
    scene.until(lambda: scene.watch.given_up(), step=0.1)
    scene.server.broken.clear()
    scene.server.set_versions(scene.service, scene.service.llm, {2})
    scene.server.set_versions(scene.service, scene.service.llm, {1, 2})
    # It may fail yet.
    scene.server.publish("version-1", phase="loading")
    for _ in range(5):
        scene.watch.look([scene.service])
    assert scene.watch.given_up()
    scene.server.publish("version-1")
    scene.until(lambda: not scene.watch.given_up())


@pytest.mark.parametrize("owner", ["admission", "router", "router_unary"])
def test_a_step_that_a_person_brought_back_is_not_given_up_any_more(scene: Scene, owner: str) -> None:
    model = f"{scene.service.name}_{owner}"
    scene.server.broken[model] = "no memory"
    scene.dies(owner)
    scene.until(lambda: scene.watch.given_up(), step=0.1)
    scene.server.broken.clear()
    control: Any = scene.server
    assert roll(control, scene.service, model, dead=1) == 2
    scene.until(lambda: not scene.watch.given_up())
    scene.dies(f"{owner}.2")
    scene.until(lambda: scene.server.lives(owner), step=0.1)


def test_a_server_that_is_gone_is_nobodys_failure(scene: Scene) -> None:
    scene.server.answering = False
    scene.dies("version-2")
    for _ in range(20):
        scene.now += 5.0
        scene.watch.look([scene.service])
        time.sleep(0.005)
    assert scene.watch.given_up() == {}
    assert scene.counts.by_process() == {}
    assert scene.state_of(2) is VersionState.CANARY
    scene.server.answering = True
    scene.until(lambda: scene.server.lives("version-2"), step=1.0)


def test_a_version_that_stands_still_is_ended(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []

    def kill(pid: int, number: int) -> None:
        killed.append(pid)
        scene.dies("version-2")

    monkeypatch.setattr(module.os, "kill", kill)
    update_policy(scene.service, deadlines={"step": 5.0})
    # What admission goes by counts, and it has not published yet: the default is 30 s.
    for beat in range(29):
        scene.now += 1.0
        scene.server.publish("version-1")
        scene.server.publish("version-2", busy=True, beats=7, beat=beat)
        scene.watch.end_stuck([scene.service])
    assert killed == []
    for beat in range(3):
        scene.now += 1.0
        scene.server.publish("version-1")
        scene.server.publish("version-2", busy=True, beats=7, beat=beat)
        scene.watch.end_stuck([scene.service])
    assert len(killed) == 1
    scene.until(lambda: scene.server.lives("version-2") and scene.counts.by_process())
    assert scene.counts.samples("deepseek", ())[0] == (
        "piccard_revivals_total",
        {"service": "deepseek", "owner": "version-2", "cause": "stuck"},
        1.0,
    )


def test_a_router_that_publishes_nothing_is_ended(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock is held and its clients wait: only the time of its report tells."""
    ended: list[int] = []

    def kill(pid: int, number: int) -> None:
        ended.append(pid)
        scene.dies("router")

    monkeypatch.setattr(module.os, "kill", kill)
    scene.server.publish("router", in_flight={"1": 3})
    for _ in range(100):
        scene.now += 1.0
        scene.server.publish("version-1")
        scene.server.publish("admission")
        scene.watch.end_stuck([scene.service])
        if ended:
            break
    assert len(ended) == 1
    scene.until(lambda: scene.server.lives("router.2"))
    assert ("piccard_revivals_total", {"service": "deepseek", "owner": "router", "cause": "stuck"}, 1.0) in (
        scene.counts.samples("deepseek", ())
    )


def test_a_version_that_loads_may_stand_still(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "kill", lambda *_: pytest.fail("it was ended"))
    scene.server.publish("version-2", phase="loading", busy=True, beats=7)
    for _ in range(100):
        scene.now += 1.0
        scene.server.publish("version-1")
        scene.watch.end_stuck([scene.service])


def test_a_gauge_that_said_one_says_zero_afterwards() -> None:
    counts = RevivalCounts()
    assert counts.samples("deepseek", ["other/router"]) == []
    given_up = ("piccard_given_up", {"service": "deepseek", "owner": "router"})
    assert counts.samples("deepseek", ["deepseek/router"]) == [(*given_up, 1.0)]
    assert counts.samples("deepseek", []) == [(*given_up, 0.0)]
    assert counts.samples("other", []) == []


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes that were killed, each of which is really this one."""
    pids: list[int] = []
    monkeypatch.setattr(module.os, "kill", lambda pid, number: pids.append(pid))
    return pids


def drains(scene: Scene, **report: object) -> Callable[[float], None]:
    """Version 2 drains and tells `report`; returns what lets so many seconds pass."""
    move(scene.store, 2, VersionState.READY)
    move(scene.store, 2, VersionState.DRAINING)
    scene.server.publish("version-2", **report)

    def pass_by(seconds: float) -> None:
        scene.watch.retire_drained([scene.service])
        scene.now += seconds
        scene.watch.retire_drained([scene.service])

    return pass_by


def test_a_draining_process_that_the_server_forgot_is_ended(scene: Scene, killed: list[int]) -> None:
    scene.server.ready.discard((scene.service.llm, 2))
    pass_by = drains(scene)
    pass_by(module.DRAIN_QUIET - 1)
    assert killed == []
    pass_by(1)
    assert killed == [os.getpid()]


@pytest.mark.parametrize("report", [{"phase": "ending"}, {"running": 1}], ids=["told to end", "has a request"])
def test_a_draining_process_that_ends_by_itself_is_left_alone(
    scene: Scene, killed: list[int], report: dict[str, object]
) -> None:
    """Killed while it answers the server, it would take the server and every stream along."""
    scene.server.ready.discard((scene.service.llm, 2))
    drains(scene, **report)(1000.0)
    assert killed == []


def test_a_draining_process_that_is_not_dropped_yet_is_left_alone(scene: Scene, killed: list[int]) -> None:
    """`retire` writes the state first, and then may wait until the server has loaded another version."""
    drains(scene)(1000.0)
    assert killed == []
