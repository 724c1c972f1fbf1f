"""Admission and routers go over to the installed code by their other folders, those that read first."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import pytest
from piccard import roll as module
from piccard.drift import installed_ensemble_hash
from piccard.errors import OperationError
from piccard.operation import Operation
from piccard.places import places
from piccard.roll import roll
from piccard.state_store import StateStore
from piccard.triton_control import IndexEntry, LoadError, TritonControl
from piccard_contract.home import Service
from piccard_contract.live_state import LiveState
from piccard_contract.process_lock import ProcessLock

OLD = "0" * 64


class Steps:
    """A server's admission and routers: each folder that is loaded has a process that reports its code.

    Attributes:
        code: what processes that start now run.
        busy: names whose processes do not end when they are dropped.
        loads: (model, folders) of every load.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        self.code = OLD
        self.busy: set[str] = set()
        self.loads: list[tuple[str, list[int]]] = []
        self.refused: set[str] = set()
        self._live = LiveState(service.live_state, service.run_folder)
        self._loaded: dict[str, set[int]] = {}
        self._locks: dict[str, ProcessLock] = {}
        for place in places(service, ()):
            self._change(place.model, {1})

    def close(self) -> None:
        for lock in self._locks.values():
            lock.release()
        self._live.close()

    def finish(self) -> None:
        """The last requests of all that was dropped are over."""
        self.busy.clear()
        for model, folders in self._loaded.items():
            self._change(model, folders)

    def index(self) -> list[IndexEntry]:
        return [IndexEntry(model, n, "READY", "") for model, folders in self._loaded.items() for n in sorted(folders)]

    def ready_versions(self, model: str) -> list[int]:
        return sorted(self._loaded[model])

    def set_versions(self, service: Service, model: str, versions: Iterable[int], timeout: float | None = None) -> None:
        if model in self.refused:
            raise LoadError(f"{model} is not loaded: its code is broken")
        self.loads.append((model, sorted(versions)))
        self._change(model, set(versions))

    def _change(self, model: str, wanted: set[int]) -> None:
        place = next(place for place in places(self.service, ()) if place.model == model)
        for number, owner in place.owners:
            if number in wanted and owner not in self._locks:
                lock = self._locks[owner] = ProcessLock(self.service.process_lock(owner))
                lock.acquire()
                self._live.writer(owner).publish({"code_hash": self.code})
            elif number not in wanted and owner in self._locks and place.name not in self.busy:
                self._locks.pop(owner).release()
        self._loaded[model] = wanted


@pytest.fixture
def server(service: Service) -> Iterator[Steps]:
    steps = Steps(service)
    yield steps
    steps.close()


def operation_of(server: Steps, *, dry_run: bool = False) -> Operation:
    control = cast(TritonControl, server)
    return Operation(server.service, StateStore(server.service), control, dry_run=dry_run, tell=print)


def upgrade(server: Steps) -> str:
    """Processes that start from now on run what is installed."""
    server.code = installed_ensemble_hash()
    return server.code[:12]


def test_all_that_differ_are_rolled_routers_first(server: Steps) -> None:
    installed = upgrade(server)
    outcome = roll(operation_of(server), [], wait=0.0)
    service = server.service
    assert server.loads == [
        (model, folders)
        for model in (service.router, service.router_unary, service.admission)
        for folders in ([1, 2], [2])
    ]
    assert outcome.changed
    assert outcome.before["router"] == {"folder": 1, "code": OLD[:12]}
    assert outcome.after["router"] == {"folder": 2, "code": installed}
    assert f"router, router_unary, admission run the installed code {installed}" in outcome.message
    assert '"roll what differs"' in service.audit_log.read_text()


def test_done_twice_it_does_nothing(server: Steps) -> None:
    upgrade(server)
    roll(operation_of(server), [], wait=0.0)
    server.loads.clear()
    outcome = roll(operation_of(server), [], wait=0.0)
    assert not outcome.changed
    assert server.loads == []


def test_one_that_is_named_is_rolled_whatever_it_runs_and_back_again(server: Steps) -> None:
    upgrade(server)
    for folder in (2, 1, 2):
        outcome = roll(operation_of(server), ["router"], wait=0.0)
        assert outcome.after["router"]["folder"] == folder
    assert {model for model, _ in server.loads} == {server.service.router}


def test_a_dry_run_says_what_would_be(server: Steps) -> None:
    upgrade(server)
    outcome = roll(operation_of(server, dry_run=True), [], wait=0.0)
    assert outcome.changed
    assert server.loads == []


def test_a_twin_with_requests_is_waited_for(server: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    upgrade(server)
    server.busy.add("router")
    roll(operation_of(server), ["router"], wait=0.0)
    with pytest.raises(OperationError, match="its process of folder 1 has requests yet"):
        roll(operation_of(server), ["router"], wait=0.0)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: server.finish())
    assert roll(operation_of(server), ["router"], wait=60.0).after["router"]["folder"] == 1


@pytest.mark.parametrize("changed", [False, True])
def test_a_roll_that_was_cut_short_is_finished(server: Steps, changed: bool) -> None:
    if not changed:
        upgrade(server)
    model = server.service.router
    server.set_versions(server.service, model, [1, 2])
    upgrade(server)
    server.loads.clear()
    roll(operation_of(server), [] if changed else ["router"], wait=0.0)
    # Folder 2 runs the installed code where that did not change again.
    rolled = [(model, [1, 2]), (model, [1])] if changed else []
    assert [load for load in server.loads if load[0] == model] == [(model, [2]), *rolled]


def test_what_was_rolled_before_a_failure_stays_so(server: Steps) -> None:
    upgrade(server)
    server.refused.add(server.service.admission)
    with pytest.raises(LoadError, match="its code is broken"):
        roll(operation_of(server), [], wait=0.0)
    assert [server.ready_versions(model) for model in (server.service.router, server.service.admission)] == [[2], [1]]


@pytest.mark.parametrize(
    ("change", "names", "told"),
    [
        (lambda op: op, ["version-1"], "there is no version-1 to roll; there are: router, router_unary, admission"),
        (lambda op: Operation(op.service, op.store, None, op.dry_run, op.tell), [], "no server runs"),
    ],
    ids=["no such process", "no server"],
)
def test_what_cannot_be_rolled(
    server: Steps, change: Callable[[Operation], Operation], names: list[str], told: str
) -> None:
    with pytest.raises(OperationError, match=told):
        roll(change(operation_of(server)), names, wait=0.0)


def test_a_new_process_that_tells_nothing_is_told_of(server: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    server.code = ""
    monkeypatch.setattr(module, "_REPORT", 0.0)
    with pytest.raises(OperationError, match="tells nothing of itself"):
        roll(operation_of(server), ["admission"], wait=0.0)


def test_the_command(service: Service, piccard: Callable[..., Any]) -> None:
    result = piccard(service.home, "roll", "router", check=False)
    assert result.returncode == 1
    assert "no server runs" in result.stderr
    assert piccard(service.home, "roll", "nothing", check=False).returncode == 2
