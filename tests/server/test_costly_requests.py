"""Requests, headers and connections that are made to cost: bounded memory, clear errors, and others are unharmed."""

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import psutil
import pytest
import tritonclient.grpc as grpcclient
from entry_points import ENTRY_POINTS
from piccard_contract.request import MAX_REQUEST_BYTES
from piccard_server import RunningServer, wait_for
from running_stream import RunningStream
from short_calls import answers_http
from triton_calls import GrpcStream, grpc_inputs
from tritonclient.utils import InferenceServerException

MEBI = 2**20
HUGE = 100 * MEBI
GENERATE = "/v2/models/deepseek/generate"
_OWN = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_send_message_length", 2**31 - 1),
    ("grpc.max_receive_message_length", 2**31 - 1),
]
OWNERS = ("admission", "router", "router_unary", "version-1", "version-2")

# Resident MiB that a process may have at its height, whatever is sent. A body of 100 MiB stands in the server a few
# times, and once in admission, which looks no further.
MOST_SERVER = 1600
MOST_MODEL = 700


def heights(server: RunningServer) -> dict[str, int]:
    """The most resident MiB that each process ever had."""
    pids = {"server": server.server_pid(), **{owner: server.pid(owner) for owner in OWNERS}}
    return {name: _mebibytes(pid, "VmHWM") for name, pid in pids.items()}


def resident(server: RunningServer) -> dict[str, int]:
    """Resident MiB of each process now."""
    pids = {"server": server.server_pid(), **{owner: server.pid(owner) for owner in OWNERS}}
    return {name: _mebibytes(pid, "VmRSS") for name, pid in pids.items()}


def _mebibytes(pid: int, key: str) -> int:
    with open(f"/proc/{pid}/status") as status:
        (line,) = (line for line in status if line.startswith(key))
    return int(line.split()[1]) // 1024


@pytest.fixture(scope="module")
def other(server: RunningServer) -> Iterator[RunningStream]:
    """A client that has nothing to do with it, whose stream goes on all the while."""
    stream = RunningStream(
        server.grpc,
        server.service.ensemble,
        headers={"x-canary": "false"},
        timeout=600,
        text_input="a b c",
        sampling_parameters={"max_tokens": 30_000},
        extensions={"script": {"tokens": 30_000, "delay_s": 0.05}},
    ).wait_first()
    yield stream
    assert stream.running, stream.error
    # Else the server's end would wait for it.
    token = stream.responses[0]["cancel_token"][0]
    assert ENTRY_POINTS["http_infer"](server, {}, {}, {"extensions": {"cancel": token}}).details["cancelled"]


@pytest.fixture(autouse=True)
def unharmed(server: RunningServer, other: RunningStream, request: pytest.FixtureRequest) -> Iterator[None]:
    pids = [server.server_pid(), *(server.pid(owner) for owner in OWNERS)]
    yield
    assert answers_http(server)
    heard = len(other.responses)
    wait_for(lambda: len(other.responses) > heard, 60, "the other client's stream")
    assert [server.server_pid(), *(server.pid(owner) for owner in OWNERS)] == pids
    height = heights(server)
    print(f"\n{request.node.name}: {height}")
    assert height["server"] < MOST_SERVER
    assert all(height[owner] < MOST_MODEL for owner in OWNERS), height


def post(server: RunningServer, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection(server.http, timeout=200)
    try:
        connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body), headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    finally:
        connection.close()


def generate(server: RunningServer, **fields: Any) -> tuple[int, str]:
    return post(server, GENERATE, fields)


def infer(server: RunningServer, **inputs: Any) -> str:
    """What gRPC says."""
    with own_client(server) as client:
        try:
            client.infer(server.service.unary, grpc_inputs(**inputs), client_timeout=200)
        except InferenceServerException as error:
            return str(error)
    return "OK"


def own_client(server: RunningServer) -> grpcclient.InferenceServerClient:
    """A client with a connection of its own: clients of one process share theirs, and with it what becomes of it."""
    return grpcclient.InferenceServerClient(server.grpc, channel_args=_OWN)


def chat(size: int) -> str:
    return json.dumps([{"role": "user", "content": "a" * size}])


def test_a_body_of_100_mebibytes_over_http(server: RunningServer) -> None:
    for fields in ({"text_input": "a" * HUGE}, {"messages": chat(HUGE)}):
        status, text = generate(server, **fields)
        assert status == 400
        assert "REQUEST_TOO_LARGE" in text


def test_a_request_of_100_mebibytes_over_grpc(server: RunningServer) -> None:
    for inputs in (
        {"text_input": "a" * HUGE},
        {"messages": chat(HUGE)},
        {"input_ids": [7] * (HUGE // 8)},
        {"text_input": "a", "sampling_parameters": '{"stop": "' + "a" * HUGE + '"}'},
    ):
        assert "REQUEST_TOO_LARGE" in infer(server, **inputs)


def test_just_under_the_limit(server: RunningServer) -> None:
    """It is read, and then too long for the context, which is told without encoding it."""
    size = MAX_REQUEST_BYTES - 1000
    assert "CONTEXT_LENGTH_EXCEEDED" in generate(server, text_input="a" * size)[1]
    assert "CONTEXT_LENGTH_EXCEEDED" in generate(server, messages=chat(size))[1]
    assert "CONTEXT_LENGTH_EXCEEDED" in infer(server, text_input="a" * size)
    assert "CONTEXT_LENGTH_EXCEEDED" in infer(server, input_ids=[7] * (size // 8))


def test_a_body_that_never_comes(server: RunningServer) -> None:
    with ExitStack() as stack:
        for _ in range(20):
            connection = stack.enter_context(socket.create_connection(server.http.split(":"), timeout=20))
            connection.sendall(f"POST {GENERATE} HTTP/1.1\r\nHost: x\r\nContent-Length: {2**34}\r\n\r\n{{".encode())
        assert answers_http(server)


def send_headers(server: RunningServer, headers: list[bytes]) -> bytes:
    """The beginning of the answer to a good request with these header lines; empty where it was hung up on."""
    body = json.dumps({"text_input": "a b", "max_tokens": 2}).encode()
    head = [f"POST {GENERATE} HTTP/1.1".encode(), b"Host: x", b"Content-Length: %d" % len(body), *headers]
    with socket.create_connection(server.http.split(":"), timeout=60) as connection:
        with suppress(OSError):
            connection.sendall(b"\r\n".join(head) + b"\r\n\r\n" + body)
        with suppress(OSError):
            return connection.recv(200)
    return b""


def test_10_000_headers_over_http(server: RunningServer) -> None:
    answer = send_headers(server, [b"X-Header-%d: value" % number for number in range(10_000)])
    assert answer == b"" or answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 4"))


@pytest.mark.parametrize("name", [b"X-User", b"X-Session-Id", b"X-Request-Id", b"X-Canary", b"Cookie"])
def test_a_header_of_10_mebibytes_over_http(server: RunningServer, name: bytes) -> None:
    answer = send_headers(server, [name + b": " + b"v" * (10 * MEBI)])
    assert answer == b"" or answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 4"))


@pytest.mark.parametrize(("count", "size"), [(10_000, 10), (1, MEBI), (1, 10 * MEBI)])
def test_metadata_over_grpc(server: RunningServer, count: int, size: int) -> None:
    metadata = {f"x-user-{number}" if count > 1 else "x-user": "v" * size for number in range(count)}
    with own_client(server) as client, pytest.raises(InferenceServerException) as refused:
        client.infer(server.service.unary, grpc_inputs(text_input="a"), headers=metadata, client_timeout=300)
    # The server refuses the stream, or hangs up while the rest is on its way.
    assert any(status in str(refused.value) for status in ("RESOURCE_EXHAUSTED", "UNAVAILABLE", "INTERNAL")), (
        refused.value
    )


def test_a_long_value_of_a_sticky_key(server: RunningServer) -> None:
    """What the server lets through is hashed and noted, and no longer than it was sent."""
    answer = ENTRY_POINTS["grpc_unary"](server, {"x-user": "v" * 7000}, {}, {"text_input": "a"})
    assert answer.reason == "sticky"
    answer = ENTRY_POINTS["grpc_unary"](server, {"x-request-id": "v" * 7000}, {}, {"text_input": "a"})
    assert answer.code == "INVALID_VALUE"


ODD: dict[str, tuple[str, dict[str, Any]]] = {
    "stop strings": ("REQUEST_TOO_LARGE", {"sampling_parameters": {"stop": [f"s{i}" for i in range(100_000)]}}),
    "a long stop string": ("INVALID_VALUE", {"sampling_parameters": {"stop": ["x" * 7 * MEBI]}}),
    "logit bias": ("REQUEST_TOO_LARGE", {"sampling_parameters": {"logit_bias": dict.fromkeys(range(100000), 1)}}),
    "keys": ("REQUEST_TOO_LARGE", {"sampling_parameters": {f"k{i}": 1 for i in range(100_000)}}),
    "nesting": ("REQUEST_TOO_LARGE", {"sampling_parameters": "[" * MEBI}),
    "empty lists": ("REQUEST_TOO_LARGE", {"messages": f"[{','.join(['[]'] * MEBI)}]"}),
    "digits": ("INVALID_JSON", {"sampling_parameters": '{"seed": ' + "9" * 5000 + "}"}),
    "NaN": ("INVALID_JSON", {"sampling_parameters": '{"top_p": NaN}'}),
    "infinity": ("INVALID_VALUE", {"sampling_parameters": '{"temperature": 1e999}'}),
    "surrogate": ("INVALID_ENCODING", {"messages": '[{"role": "user", "content": "\\ud800"}]'}),
    "a template variable": (
        "INVALID_VALUE",
        {"messages": chat(1), "extensions": {"chat_template_kwargs": {"messages": []}}},
    ),
}


@pytest.mark.parametrize("entry", ["generate", "grpc_unary"])
@pytest.mark.parametrize("case", ODD)
def test_odd_values_end_in_an_error(server: RunningServer, case: str, entry: str) -> None:
    code, inputs = ODD[case]
    prompt = {} if "messages" in inputs else {"text_input": "a"}
    assert ENTRY_POINTS[entry](server, {}, {}, {**prompt, **inputs}).code == code


@pytest.mark.parametrize(
    "body",
    [
        b'{"text_input": "a", "text_input": "b"}',
        b'{"text_input": "a", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"text_input": "a", "temperature": NaN}',
        b'{"text_input": "a", "temperature": Infinity}',
        b'{"text_input": "\\ud800"}',
        b'{"text_input": "\xff\xfe"}',
        b'{"text_input": "a\\u0000b", "max_tokens": 1}',
        b'{"text_input": "a", "id": "\\u0000\\n"}',
        b'{"text_input": "a", ' + b",".join(b'"p%d": 1' % number for number in range(2_000)) + b"}",
        b'{"text_input": "a", "x": ' + b"[" * 1000 + b"]" * 1000 + b"}",
    ],
    ids=["keys", "digits", "NaN", "infinity", "surrogate", "bytes", "NUL", "id", "parameters", "nesting"],
)
def test_odd_bodies_are_answered(server: RunningServer, body: bytes) -> None:
    status, text = post(server, GENERATE, body)
    assert status in (200, 400, 500)
    assert text
    assert "Traceback" not in text


def test_1000_idle_connections_on_each_port(server: RunningServer) -> None:
    """Half of those to HTTP have begun a request."""
    with ExitStack() as stack:
        for address in (server.http, server.grpc, server.metrics, server.health):
            for number in range(1000):
                connection = stack.enter_context(socket.create_connection(address.split(":"), timeout=60))
                if number % 2 and address != server.grpc:
                    connection.sendall(b"POST /v2/models/deepseek/generate HTTP/1.1\r\nHost: x\r\n")
        assert answers_http(server)
        assert ENTRY_POINTS["grpc_unary"](server, {}, {}, {"text_input": "a"}).code == "OK"
        assert "nv_inference" in server.metrics_text()
        assert server.get("livez")[0] == 200
        assert server.get("readyz")[0] == 200
        # The supervisor, too, keeps no more of them than it has to.
        assert psutil.Process(server.process.pid).num_threads() < 300


FAST = {"tokens": 30_000, "delay_s": 0.0}
SLOW = 8

# MiB that a process may rise by for them: 400 bytes for each token that nobody read.
MOST_KEPT = SLOW * FAST["tokens"] * 400 / MEBI


def slow_grpc(server: RunningServer, stack: ExitStack) -> None:
    """A gRPC stream of which nothing is read: its client's buffers fill up."""
    stop = threading.Event()
    stream = GrpcStream(server.grpc, {"x-canary": "true"})
    stream._events.put = lambda _: stop.wait(60)  # type: ignore[method-assign,assignment,misc]
    stack.callback(stream._client.close)
    stack.callback(stop.set)
    stream.send(
        "deepseek",
        text_input="a b",
        stream=True,
        sampling_parameters={"max_tokens": 30_000},
        extensions={"script": FAST},
    )


def slow_http(server: RunningServer, stack: ExitStack) -> None:
    body = json.dumps(
        {
            "text_input": "a b",
            "stream": True,
            "max_tokens": 30_000,
            "X-Canary": "true",
            "extensions": json.dumps({"script": FAST}),
        }
    ).encode()
    connection = stack.enter_context(socket.socket())
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host, port = server.http.split(":")
    connection.connect((host, int(port)))
    connection.sendall(
        b"POST /v2/models/deepseek/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s"
        % (len(body), body)
    )
    connection.recv(10)


@pytest.mark.parametrize("read", [slow_grpc, slow_http])
def test_slow_readers_cost_what_was_generated(
    server: RunningServer, read: Callable[[RunningServer, ExitStack], None]
) -> None:
    """Their streams end, and what nobody reads is kept: text, ids and whatever a response adds to them."""
    assert answers_http(server)
    before = resident(server)
    with ExitStack() as stack:
        for _ in range(SLOW):
            read(server, stack)
        assert answers_http(server)
        wait_for(lambda: server.in_flight(2) == 0, 120, "the end of what nobody reads")
        assert answers_http(server)
        rise = {name: after - before[name] for name, after in resident(server).items()}
    print(f"rise: {rise}")
    assert max(rise.values()) < MOST_KEPT, rise
