"""Versions come and go on a real server while streams run: none fails, none is cut short, nothing restarts."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from piccard.pin import pin_problem
from piccard.repository import configured_versions, stable_target, write_stable_config
from piccard.state_store import StateStore
from piccard_contract.home import version_owner
from piccard_contract.lifecycle import VersionState
from piccard_server import RunningServer, make_scripted_home, run_piccard, wait_for
from running_stream import RunningStream
from short_calls import served_by
from triton_calls import grpc_stream

# About two seconds of tokens.
SCRIPT = {"tokens": 200, "delay_s": 0.01}
WHOLE = {"sampling_parameters": {"max_tokens": 1000}, "extensions": {"script": SCRIPT}}


def start_stream(server: RunningServer, canary: bool = False) -> RunningStream:
    headers = {"x-canary": "true" if canary else "false"}
    return RunningStream(server.grpc, server.service.ensemble, headers=headers, text_input="one two three", **WHOLE)


def assert_whole(stream: RunningStream, version: int) -> None:
    assert stream.error is None
    assert stream.status == "OK"
    assert stream.versions == {version}
    assert len(stream.token_ids) == SCRIPT["tokens"]


def processes(server: RunningServer, *versions: int) -> dict[str, int]:
    """Process ids of versions, routers and admission."""
    owners = [*map(version_owner, versions), "router", "router_unary", "admission"]
    return {owner: server.pid(owner) for owner in owners}


class Background:
    """Asks for a token again and again, and notes which version gave it and what failed."""

    def __init__(self, server: RunningServer) -> None:
        self.served: list[tuple[float, int]] = []
        self.failures: list[Exception] = []
        self._server = server
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            asked = time.monotonic()
            try:
                self.served.append((asked, served_by(self._server)))
            except Exception as error:
                self.failures.append(error)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    service = make_scripted_home(tmp_path_factory.mktemp("lifecycle"), traffic_ratio=0.0)
    running = RunningServer(service.home)
    try:
        yield running.wait_ready()
    finally:
        running.stop()


@pytest.fixture
def calm_server(shared: RunningServer) -> Iterator[RunningServer]:
    """A server of versions 1 (stable) and 2 and what earlier tests published, without a canary.

    After each test its first two versions, routers and admission have to be the processes that they were before it.
    """
    before = processes(shared, 1, 2)
    yield shared
    assert processes(shared, 1, 2) == before
    shared.piccard("canary", "off")
    if shared.state().stable != 1:
        shared.piccard("promote", "1")


def publish(server: RunningServer, *options: str) -> int:
    """Publish another scripted version; its number."""
    number = server.state().next_version
    result = server.piccard("publish", "scripted", "--runner=scripted", f"--label=v{number}", "--json", *options)
    assert json.loads(result.stdout)["after"]["version"] == number
    return number


def test_promote_and_rollback_while_streams_run(calm_server: RunningServer) -> None:
    server = calm_server
    server.piccard("canary", "set", "--version=2", "--ratio=0")
    streams = [start_stream(server).wait_first(), start_stream(server, canary=True).wait_first()]
    background = Background(server)

    server.piccard("promote", "2")
    assert served_by(server) == 2
    streams.append(start_stream(server).wait_first())
    server.piccard("rollback")
    assert served_by(server) == 1

    for stream, version in zip(streams, (1, 2, 2), strict=True):
        assert_whole(stream.wait(), version)
    background.stop()
    assert not background.failures
    assert {version for _, version in background.served} == {1, 2}
    state = server.state()
    assert (state.stable, state.previous, state.canary) == (1, 2, None)
    assert stable_target(server.service) == 1
    assert configured_versions(server.service) == [1]


def test_new_requests_follow_a_promotion_at_once(calm_server: RunningServer) -> None:
    """The link is read at every request; a second is for a router that has read it and waits for a processor."""
    server = calm_server
    background = Background(server)
    promotion = threading.Thread(target=server.piccard, args=("promote", "2"))
    promotion.start()
    wait_for(lambda: server.service.stable_link.readlink().name == "2", 60, "the link")
    switched = time.monotonic()
    promotion.join()
    wait_for(lambda: len([1 for asked, _ in background.served if asked > switched + 1.0]) >= 5, 60, "new requests")
    background.stop()

    assert not background.failures
    assert {version for asked, version in background.served if asked > switched + 1.0} == {2}


def test_publication_while_two_streams_run_restarts_nothing(calm_server: RunningServer) -> None:
    server = calm_server
    server.piccard("canary", "set", "--version=2", "--ratio=0")
    started = [server.report(version_owner(version))["started_at"] for version in (1, 2)]
    streams = [start_stream(server).wait_first(), start_stream(server, canary=True).wait_first()]
    background = Background(server)

    number = publish(server)

    for stream, version in zip(streams, (1, 2), strict=True):
        assert_whole(stream.wait(), version)
    background.stop()
    assert not background.failures
    assert [server.report(version_owner(version))["started_at"] for version in (1, 2)] == started
    assert server.state().versions[number].state is VersionState.READY
    answer = grpc_stream(server.grpc, server.service.llm, version=str(number), text_input="a b", stream=True)
    assert answer[0]["served_version"] == [number]
    assert all(pin_problem(server.service.repository / model) is None for model in server.service.models)


def test_what_is_written_into_a_live_model_restarts_nothing(calm_server: RunningServer) -> None:
    server = calm_server
    notes = [server.service.version_folder(1) / "note.txt", server.service.llm_folder / "note.txt"]
    for note in notes:
        note.write_text("newer than everything but the pin")
    write_stable_config(server.service, 2)
    try:
        before = processes(server, 1, 2)
        publish(server, "--linked")
        assert processes(server, 1, 2) == before
    finally:
        write_stable_config(server.service, 1)
        for note in notes:
            note.unlink()


def test_retired_version_finishes_its_stream(calm_server: RunningServer) -> None:
    server = calm_server
    number = publish(server)
    running = RunningStream(
        server.grpc, server.service.ensemble, parameters={"version": number}, text_input="one two three", **WHOLE
    ).wait_first()

    server.piccard("retire", str(number), "--wait=60")

    assert_whole(running.wait(), number)
    assert server.state().versions[number].state is VersionState.RETIRED
    section = server.section(version_owner(number))
    assert section is not None
    assert not section.alive
    assert served_by(server) == 1


def test_version_that_cannot_load_is_marked_failed(calm_server: RunningServer, tmp_path: Path) -> None:
    server = calm_server
    running = start_stream(server).wait_first()
    checkpoint = tmp_path / "broken"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps({"architectures": ["NoSuchModel"], "model_type": "none"}))
    (checkpoint / "tokenizer.json").write_text("{}")
    (checkpoint / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    number = server.state().next_version

    result = server.piccard("publish", str(checkpoint), "--label=v9", check=False)

    assert result.returncode == 1
    assert f"version {number} is marked failed" in result.stderr
    assert "Traceback" not in result.stderr
    record = server.state().versions[number]
    assert record.state is VersionState.FAILED
    assert record.reason
    assert_whole(running.wait(), 1)
    assert server.piccard("promote", str(number), check=False).returncode == 1
    assert served_by(server) == 1
    server.piccard("retire", str(number))
    assert server.state().versions[number].state is VersionState.RETIRED


def test_second_service_of_one_server(calm_server: RunningServer) -> None:
    server = calm_server

    server.piccard("publish", "scripted", "--runner=scripted", "--label=v1.0.0", "--service=other")

    answer = grpc_stream(server.grpc, "other", text_input="a b", stream=True, sampling_parameters={"max_tokens": 2})
    assert answer[0]["served_version"] == [1]
    status = json.loads(server.piccard("status", "--json", "--service=other").stdout)
    assert status["stable"] == status["link"] == 1
    wait_for(lambda: "other" in (server.get("readyz")[1] or {}).get("services", {}), 60, "its health")
    wait_for(lambda: server.get("readyz")[0] == 200, 60, "readiness of both services")


def test_raising_the_ratio_keeps_the_salt_and_a_new_canary_gets_another(calm_server: RunningServer) -> None:
    server = calm_server
    number = publish(server, "--linked")
    salts = []
    for version, ratio in ((2, 0.1), (2, 0.5), (number, 0.1)):
        server.piccard("canary", "set", f"--version={version}", f"--ratio={ratio}")
        policy = json.loads(server.piccard("status", "--json").stdout)["policy"]
        assert (policy["canary"], policy["traffic_ratio"]) == (version, ratio)
        salts.append(policy["salt"])

    assert salts[0] == salts[1] != salts[2]
    state = server.state()
    assert state.canary == number
    assert state.versions[number].state is VersionState.CANARY
    assert state.versions[2].state is VersionState.READY


def test_doctor_finds_nothing_wrong_with_a_running_server(calm_server: RunningServer) -> None:
    assert calm_server.problems() == []


def test_next_start_loads_what_the_state_says(tmp_path: Path) -> None:
    service = make_scripted_home(tmp_path / "home", traffic_ratio=0.0)
    run_piccard(service.home, "promote", "2")
    run_piccard(service.home, "publish", "scripted", "--runner=scripted", "--label=v1.2.0")
    assert StateStore(service).read().versions[3].state is VersionState.STAGED
    server = RunningServer(service.home)
    try:
        server.wait_ready()
        wait_for(lambda: server.state().versions[3].state is VersionState.READY, 60, "version 3")
        state = server.state()
        assert (state.stable, state.previous, state.canary) == (2, 1, None)
        assert served_by(server) == 2
        assert all(server.version_ready(number) for number in (1, 2, 3))
    finally:
        server.stop()
