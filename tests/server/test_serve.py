"""`piccard serve` on a real server: what it prints, how it ends, and what it brings back."""

import ipaddress
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from piccard_contract.home import version_owner
from piccard_contract.process_lock import is_held
from piccard_server import RunningServer, free_ports, make_scripted_home, run_piccard, wait_for
from running_stream import RunningStream
from short_calls import TRY_TIMEOUT, answers, answers_unary, served_by
from triton_calls import GrpcStream, grpc_inputs, http_generate, outputs_of
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

SCRIPT = {"tokens": 100, "delay_s": 0.01}


def answers_itself(server: RunningServer, version: int) -> bool:
    try:
        return served_by(server, server.service.llm, version=str(version), timeout=TRY_TIMEOUT) == version
    except (InferenceServerException, queue.Empty):
        return False


def test_health_and_endpoints_are_told(server: RunningServer) -> None:
    assert server.get("livez")[0] == 200
    status, body = server.get("readyz")
    assert status == 200
    assert body["services"]["deepseek"]["version"] == 1
    assert server.get("elsewhere")[0] == 404
    for part in (server.grpc, f"http://{server.http}", f"http://{server.metrics}/metrics", "curl -sN", "python -c"):
        assert part in server.printed()


def test_printed_python_call_works(server: RunningServer) -> None:
    program = server.printed().split("python -c '\n")[1].split("'\n")[0]
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("def fibonacci(n):")


def test_http_and_metrics_answer(server: RunningServer) -> None:
    status, (answer,) = http_generate(server.http, server.service.ensemble, text_input="one two", max_tokens=2)
    assert status == 200
    assert answer["text_output"] == "one two one two"
    assert "nv_inference_request_success" in server.metrics_text()


def test_model_control_needs_the_key(server: RunningServer) -> None:
    client = InferenceServerClient(server.grpc)
    try:
        with pytest.raises(InferenceServerException, match="restricted"):
            client.get_model_repository_index()
        with pytest.raises(InferenceServerException, match="restricted"):
            client.unload_model(server.service.llm)
    finally:
        client.close()
    with server.control() as control:
        assert control.ready_versions(server.service.llm) == [1, 2]


def test_everything_listens_on_the_loopback_alone(server: RunningServer) -> None:
    family = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    listening = {
        ipaddress.ip_address(connection.laddr.ip.removeprefix("::ffff:"))
        for process in family
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening
    assert all(address.is_loopback for address in listening)


def test_second_server_of_a_home_is_refused(server: RunningServer) -> None:
    result = run_piccard(server.home, "serve", *_ports(), check=False)
    assert result.returncode == 1
    assert "runs already" in result.stderr
    assert "Traceback" not in result.stderr


def test_taken_port_is_found_before_the_server_starts(server: RunningServer, tmp_path: Path) -> None:
    service = make_scripted_home(tmp_path / "home")
    taken = server.grpc.split(":")[1]
    result = run_piccard(service.home, "serve", *_ports()[:1], f"--grpc-port={taken}", *_ports()[2:], check=False)
    assert result.returncode == 1
    assert f"port {taken} of 127.0.0.1" in result.stderr
    assert "--grpc-port" in result.stderr
    assert not (service.home / "state" / "logs" / "tritonserver.log").exists()


@pytest.mark.parametrize(
    ("option", "way_out"), [("--host=0.0.0.0", "--allow-open-ports"), ("--gateway-host=0.0.0.0", "piccard key add")]
)
def test_an_address_that_others_reach_is_refused_before_anything_listens(
    tmp_path: Path, option: str, way_out: str
) -> None:
    service = make_scripted_home(tmp_path / "home")
    ports = [port for port in _ports() if port != "--no-gateway"]
    result = run_piccard(service.home, "serve", option, *ports, f"--gateway-port={free_ports(1)[0]}", check=False)
    assert result.returncode == 1
    assert f"{option} opens" in result.stderr
    assert way_out in result.stderr
    assert "Traceback" not in result.stderr
    assert not (service.home / "state" / "logs" / "tritonserver.log").exists()
    assert result.stdout == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_lets_streams_finish_and_leaves_nothing(fresh_server: Callable[..., RunningServer], number: int) -> None:
    server = fresh_server()
    stream = RunningStream(
        server.grpc,
        server.service.ensemble,
        text_input="one two",
        sampling_parameters={"max_tokens": 1000},
        extensions={"script": SCRIPT},
    ).wait_first()

    assert server.stop(number=number) == 0

    assert stream.wait().error is None
    assert stream.status == "OK"
    assert len(stream.token_ids) == SCRIPT["tokens"]


@pytest.mark.parametrize("seconds", [0.0, 0.15, 0.5, 2.0])
def test_told_to_end_as_its_server_dies(fresh_server: Callable[..., RunningServer], seconds: float) -> None:
    """Before it has seen the death, as it clears away, in the pause before the next start, and as that one starts."""
    server = fresh_server(versions=1)
    os.kill(server.server_pid(), signal.SIGKILL)
    time.sleep(seconds)

    # It leaves nothing behind either.
    assert server.stop(timeout=60) == 0


@pytest.mark.parametrize(("version", "other"), [(2, 1), (1, 2)])
def test_killed_version_is_revived(fresh_server: Callable[..., RunningServer], version: int, other: int) -> None:
    server = fresh_server()
    old, untouched = server.pid(version_owner(version)), server.pid(version_owner(other))
    os.kill(old, signal.SIGKILL)
    wait_for(lambda: server.version_ready(version) and server.pid(version_owner(version)) != old, 60, "revival")
    assert server.pid(version_owner(other)) == untouched
    wait_for(lambda: server.get("readyz")[0] == 200, 60, "readiness")
    wait_for(lambda: answers(server), 60, "an answer of stable")
    told = {f"deepseek/version-{version}": 1}
    wait_for(lambda: server.report("supervisor")["revivals"] == told, 60, "its report")


def test_killed_only_version_is_revived(fresh_server: Callable[..., RunningServer]) -> None:
    server = fresh_server(versions=1)
    old = server.pid(version_owner(1))
    os.kill(old, signal.SIGKILL)
    wait_for(lambda: server.version_ready(1) and server.pid(version_owner(1)) != old, 60, "revival")
    wait_for(lambda: server.get("readyz")[0] == 200, 60, "readiness")
    wait_for(lambda: answers(server), 60, "an answer of stable")


@pytest.mark.parametrize("owner", ["admission", "router", "router_unary"])
def test_killed_step_is_rolled_to_its_other_folder(fresh_server: Callable[..., RunningServer], owner: str) -> None:
    server = fresh_server()
    os.kill(server.pid(owner), signal.SIGKILL)
    wait_for(lambda: is_held(server.service.process_lock(f"{owner}.2")), 60, "the other folder")
    wait_for(lambda: server.get("readyz")[0] == 200, 60, "readiness")
    wait_for(lambda: answers(server), 60, "an answer of stable")
    wait_for(lambda: answers_unary(server), 60, "an answer to a unary call")

    os.kill(server.pid(f"{owner}.2"), signal.SIGKILL)
    wait_for(lambda: is_held(server.service.process_lock(owner)), 60, "the first folder")
    wait_for(lambda: server.get("readyz")[0] == 200, 60, "readiness")
    wait_for(lambda: answers(server), 60, "an answer of stable")


def test_a_killed_router_takes_no_version_along(fresh_server: Callable[..., RunningServer]) -> None:
    """Triton waits for ever where a response is handed to a dead router: its versions must not."""
    server = fresh_server()
    streams = [
        RunningStream(
            server.grpc,
            server.service.ensemble,
            headers={"x-canary": canary},
            text_input="one",
            sampling_parameters={"max_tokens": 2000},
            extensions={"script": {"tokens": 2000, "delay_s": 0.1}},
        )
        for canary in ("true", "false") * 4
    ]
    for stream in streams:
        stream.wait_first()
    before = server.server_pid()
    os.kill(server.pid("router"), signal.SIGKILL)

    # One that died with a lock of the server in its hands takes the server along, which is then started again.
    rolled = server.service.process_lock("router.2")
    wait_for(lambda: is_held(rolled) or server.server_pid() not in (0, before), 60, "the other folder or server")
    # A response that was on its way costs a version its process, which is then started again.
    for version in (1, 2):
        wait_for(lambda version=version: answers_itself(server, version), 60, f"version {version}")
    wait_for(lambda: server.get("readyz")[0] == 200, 60, "readiness")
    wait_for(lambda: answers(server), 60, "an answer of stable")
    owners = [version_owner(version) for version in (1, 2)]
    wait_for(lambda: not any(server.report(owner)["running"] for owner in owners), 60, "the end of what it ran")


# Seconds that a client of these tests waits: for each response of a stream, for the whole of a unary call.
CLIENT_TIMEOUT = 15.0


def ask(server: RunningServer, *, tokens: int, delay: float, unary: bool) -> str:
    """The text of a call with a client's timeout, which repeats its two words."""
    inputs = {
        "text_input": "one two",
        "exclude_input_in_output": True,
        "sampling_parameters": {"max_tokens": tokens},
        "extensions": {"script": {"tokens": tokens, "delay_s": delay}},
    }
    if unary:
        with InferenceServerClient(server.grpc) as client:
            result = client.infer(server.service.unary, grpc_inputs(**inputs), client_timeout=CLIENT_TIMEOUT)
        return str(outputs_of(result)["text_output"][0])
    with GrpcStream(server.grpc) as stream:
        stream.send(server.service.ensemble, stream=True, **inputs)
        return "".join(outputs["text_output"][0] for outputs in stream.responses(CLIENT_TIMEOUT))


def is_answered(server: RunningServer, *, unary: bool) -> bool:
    """Whether a call is answered, whole; any other ends by its timeout or with an error."""
    try:
        text = ask(server, tokens=10, delay=0.0, unary=unary)
    except (InferenceServerException, queue.Empty):
        return False
    assert text.split() == ["one", "two"] * 5
    return True


def requests_at(server: RunningServer, owner: str) -> int:
    """Requests that a router reports, or that wait for admission."""
    if owner == "admission":
        return int(server.metric("nv_inference_pending_request_count", model=server.service.admission))
    section = server.section(owner)
    return 0 if section is None else sum(section.data["in_flight"].values())


@pytest.mark.parametrize("owner", ["admission", "router", "router_unary"])
def test_clients_of_a_killed_step_send_again_after_their_timeout(
    fresh_server: Callable[..., RunningServer], owner: str
) -> None:
    # Its end is not to wait for what is lost.
    server = fresh_server(options=("--exit-timeout=1",))
    unary, calls = owner == "router_unary", 4
    # Admission is done with a request at once: where it stands still, one is in its hands and the others wait for it.
    if owner == "admission":
        os.kill(server.pid(owner), signal.SIGSTOP)
    with ThreadPoolExecutor(calls) as pool:
        asked = [pool.submit(ask, server, tokens=1000, delay=1.0, unary=unary) for _ in range(calls)]
        wait_for(lambda: requests_at(server, owner) >= calls - (owner == "admission"), 60, "the requests")
        os.kill(server.pid(owner), signal.SIGKILL)

        # Nobody tells those of a router anything, neither an error nor an end that would look like one; those that
        # wait for admission may be told that its process is dead.
        ended = [one.exception(120) for one in asked]
        silent = [error for error in ended if isinstance(error, queue.Empty) or "Deadline Exceeded" in str(error)]
        refused = [error for error in ended if "is not healthy" in str(error)]
        assert len(silent) + len(refused) == calls, ended
        assert owner == "admission" or not refused, ended
    wait_for(lambda: is_answered(server, unary=unary), 60, "an answer to a call that is sent again")


def test_readyz_tells_that_stable_is_dead(fresh_server: Callable[..., RunningServer]) -> None:
    # The supervisor is not to end it meanwhile.
    server = fresh_server(versions=1, deadlines={"step": 3600.0})
    os.kill(server.pid(version_owner(1)), signal.SIGSTOP)
    try:
        wait_for(lambda: server.get("readyz")[0] == 503, 60, "the truth")
        assert server.get("livez")[0] == 200
    finally:
        os.kill(server.pid(version_owner(1)), signal.SIGCONT)
    wait_for(lambda: server.get("readyz")[0] == 200, 60, "readiness")


def _ports() -> list[str]:
    names = ("--http-port", "--grpc-port", "--metrics-port", "--health-port")
    return [*(f"{name}={port}" for name, port in zip(names, free_ports(4), strict=True)), "--no-gateway"]
