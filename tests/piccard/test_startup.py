"""What a supervisor brings up on a server that it took over: what is half way and nobody's, and nothing else."""

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from fake_triton import FakeControl, FakeTriton, fake_probe
from operated_service import AlwaysReady
from piccard import startup as module
from piccard.settle import settle
from piccard.startup import Startup
from piccard.state_store import StateStore, operator_lock
from piccard_contract.home import Service
from piccard_contract.lifecycle import VersionRecord, VersionState, now


@pytest.fixture
def server(service: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTriton]:
    """It runs with versions 1 and 2; version 3 was left loading."""
    monkeypatch.setattr("piccard.version_loading.probe_version", fake_probe)
    with StateStore(service).change() as state:
        state.versions[3] = VersionRecord(state=VersionState.LOADING, label="v3", published_at=now(), changed_at=now())
        state.next_version = 4
    made = FakeTriton(service)
    made.start()
    made.set_versions({1, 2})
    yield made
    made.close()


def start_up(server: FakeTriton) -> list[str]:
    told: list[str] = []
    control: Any = FakeControl(server, lambda _: None)
    ready: Any = AlwaysReady()
    addresses = dict.fromkeys(("http", "grpc", "metrics", "health"), "127.0.0.1:1")
    startup = Startup(control, ready, addresses, told.append, threading.Event(), taken_over=True)
    assert startup.run([server.service])
    return told


def add_folder(service: Service, number: int) -> None:
    folder = service.version_folder(number)
    folder.mkdir()
    for name in ("model.py", "version.yaml"):
        (folder / name).write_text((service.version_folder(1) / name).read_text())


def test_what_was_left_half_way_is_loaded_and_nothing_restarts(server: FakeTriton, service: Service) -> None:
    add_folder(service, 3)
    start_up(server)
    assert server.starts == {1: 1, 2: 1, 3: 1}
    assert StateStore(service).read().versions[3].state is VersionState.READY


def test_what_a_command_is_at_is_left_to_it(
    server: FakeTriton, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_folder(service, 3)
    monkeypatch.setattr(module, "operator_lock", partial(operator_lock, timeout=0.1))
    with operator_lock(service.home):
        told = start_up(server)
    assert "left to the command at work" in told[-1]
    assert server.starts == {1: 1, 2: 1}


def test_a_stable_version_that_is_not_loaded_just_now_has_not_failed(server: FakeTriton, service: Service) -> None:
    """The supervisor before may have died between the unload and the load of a revival; the watch goes on with it."""
    add_folder(service, 3)
    server.set_versions({2})
    start_up(server)
    assert StateStore(service).read().versions[1].state is VersionState.STABLE


def test_settling_a_server_that_runs_leaves_its_configuration(server: FakeTriton, service: Service) -> None:
    config = service.repository / service.router / "config.pbtxt"
    config.write_text(config.read_text() + "# of an older Piccard\n")
    before = config.read_text()
    service.stable_link.unlink()
    service.stable_link.symlink_to("2")
    control: Any = FakeControl(server, lambda _: None)
    settle([service], lambda _: None, control)
    assert config.read_text() == before
    assert service.stable_link.readlink().name == "1"
