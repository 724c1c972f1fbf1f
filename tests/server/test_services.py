"""Two services on one server, each with its own stable and canary: what fails in one leaves the other alone."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from piccard.repository import stable_target
from piccard.state_store import StateStore
from piccard_contract.home import Service, version_owner
from piccard_contract.lifecycle import VersionState
from piccard_contract.live_state import LiveState
from piccard_contract.process_lock import holder_pid
from piccard_server import RunningServer, make_scripted_home, wait_for
from running_stream import RunningStream
from short_calls import answers, served_by

OTHER = "coder"

# About two seconds of tokens.
SCRIPT = {"tokens": 200, "delay_s": 0.01}


def processes(service: Service) -> dict[str, int | None]:
    owners = [*map(version_owner, StateStore(service).read().loaded()), "router", "router_unary", "admission"]
    return {owner: holder_pid(service.process_lock(owner)) for owner in owners}


def start_stream(server: RunningServer, model: str) -> RunningStream:
    return RunningStream(
        server.grpc,
        model,
        headers={"x-canary": "false"},
        text_input="one two",
        sampling_parameters={"max_tokens": 1000},
        extensions={"script": SCRIPT},
    ).wait_first()


def assert_whole(stream: RunningStream, version: int) -> None:
    stream.wait()
    assert stream.error is None
    assert stream.status == "OK"
    assert stream.versions == {version}
    assert len(stream.token_ids) == SCRIPT["tokens"]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """`deepseek` with stable 1 and canary 2; `coder` with stable 1, canary 2 and ready 3, published while it runs."""
    service = make_scripted_home(tmp_path_factory.mktemp("services"), traffic_ratio=0.0)
    server = RunningServer(service.home)
    try:
        server.wait_ready()
        for label in ("v1.0.0", "v1.1.0", "v1.2.0"):
            publish = ("publish", "scripted", "--runner=scripted", "--linked", f"--label={label}")
            server.piccard(*publish, f"--service={OTHER}")
        server.piccard("canary", "set", "--version=2", "--ratio=0", f"--service={OTHER}")
        wait_for(lambda: OTHER in (server.get("readyz")[1] or {}).get("services", {}), 60, "the other's health")
        yield server
    finally:
        server.stop()


@pytest.fixture
def other(both: RunningServer) -> Service:
    return Service(both.home, OTHER)


def test_each_has_its_own_stable_and_canary(both: RunningServer, other: Service) -> None:
    before = processes(both.service)
    both.piccard("promote", "3", f"--service={OTHER}")
    try:
        assert (stable_target(both.service), stable_target(other)) == (1, 3)
        assert (served_by(both, "deepseek"), served_by(both, OTHER)) == (1, 3)
        # The promotion ended the canary of its own service alone.
        assert (served_by(both, "deepseek", canary=True), StateStore(other).read().canary) == (2, None)
    finally:
        both.piccard("rollback", f"--service={OTHER}")
        both.piccard("canary", "set", "--version=2", "--ratio=0", f"--service={OTHER}")
    assert (served_by(both, OTHER), served_by(both, OTHER, canary=True)) == (1, 2)
    assert processes(both.service) == before


def test_killed_stable_of_one_leaves_the_other_alone(both: RunningServer, other: Service) -> None:
    untouched = processes(both.service)
    stream = start_stream(both, "deepseek")
    old = holder_pid(other.process_lock(version_owner(1)))
    assert old is not None
    os.kill(old, signal.SIGKILL)

    assert served_by(both, "deepseek") == 1
    wait_for(lambda: _is_ready(other, 1) and holder_pid(other.process_lock(version_owner(1))) != old, 60, "revival")

    assert_whole(stream, 1)
    assert processes(both.service) == untouched
    wait_for(lambda: both.get("readyz")[0] == 200, 60, "readiness of both")
    wait_for(lambda: answers(both, OTHER), 60, "an answer of stable")


def test_broken_policy_of_one_leaves_the_other_alone(both: RunningServer, other: Service) -> None:
    text = other.policy_file.read_text(encoding="utf-8")
    other.policy_file.write_text("traffic_ratio: 7\n", encoding="utf-8")
    try:
        told = both.piccard("doctor", f"--service={OTHER}", check=False)
        assert told.returncode == 1
        assert "traffic_ratio" in told.stdout
        both.piccard("canary", "set", "--version=2", "--ratio=1.0")
        assert served_by(both, "deepseek", canary=True) == 2
        # The broken one goes on with its last good policy.
        assert (served_by(both, OTHER), served_by(both, OTHER, canary=True)) == (1, 2)
        assert both.problems() == []
    finally:
        other.policy_file.write_text(text, encoding="utf-8")
        both.piccard("canary", "set", "--version=2", "--ratio=0")


def test_readiness_of_one_is_not_that_of_the_other(both: RunningServer, other: Service) -> None:
    def ready() -> list[int]:
        return [both.get(path)[0] for path in ("readyz", "readyz/deepseek", f"readyz/{OTHER}")]

    wait_for(lambda: ready() == [200, 200, 200], 60, "readiness of both")
    target = os.readlink(other.stable_link)
    other.stable_link.unlink()
    try:
        wait_for(lambda: ready() == [503, 200, 503], 60, "the other's want of a stable version")
    finally:
        other.stable_link.symlink_to(target)
    wait_for(lambda: ready() == [200, 200, 200], 60, "readiness of both again")
    assert both.get("readyz/none")[0] == 404


def test_failed_publication_of_one_leaves_the_other_alone(both: RunningServer, other: Service, tmp_path: Path) -> None:
    untouched = processes(both.service)
    stream = start_stream(both, "deepseek")
    number = StateStore(other).read().next_version
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NoSuchModel"], "model_type": "none"}))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")

    assert both.piccard("publish", str(tmp_path), "--label=v9", f"--service={OTHER}", check=False).returncode == 1

    assert StateStore(other).read().versions[number].state is VersionState.FAILED
    assert number not in StateStore(both.service).read().versions
    assert_whole(stream, 1)
    assert processes(both.service) == untouched
    both.piccard("retire", str(number), f"--service={OTHER}")


def _is_ready(service: Service, version: int) -> bool:
    live = LiveState(service.live_state, service.run_folder)
    try:
        section = live.read(version_owner(version))
    finally:
        live.close()
    return section is not None and section.alive and section.data.get("phase") == "ready"
