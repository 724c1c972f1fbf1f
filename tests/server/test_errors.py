"""Every bad input on every entry point of a real server: its code, its status, and then the server still serves."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from entry_points import ENTRY_POINTS, STREAMING, Answer
from piccard_contract.errors import ErrorCode, kind_of
from piccard_contract.request import MAX_REQUEST_BYTES
from piccard_server import RunningServer
from short_calls import answers_http
from triton_calls import grpc_inputs
from tritonclient.utils import InferenceServerException

CHAT = [{"role": "user", "content": "hello"}]
DEEP = json.loads("[" * 100 + "]" * 100)

# name -> (code, inputs, request parameters)
BAD: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "no prompt": ("MISSING_INPUT", {"sampling_parameters": {}}, {}),
    "empty text": ("MISSING_INPUT", {"text_input": ""}, {}),
    "empty chat": ("MISSING_INPUT", {"messages": []}, {}),
    "all prompts at once": ("CONFLICTING_INPUTS", {"text_input": "a", "messages": CHAT, "input_ids": [70000]}, {}),
    "text and chat": ("CONFLICTING_INPUTS", {"text_input": "a", "messages": CHAT}, {}),
    "broken sampling": ("INVALID_JSON", {"text_input": "a", "sampling_parameters": "{temperature: 1"}, {}),
    "sampling list": ("INVALID_JSON", {"text_input": "a", "sampling_parameters": [1]}, {}),
    "sampling NaN": ("INVALID_JSON", {"text_input": "a", "sampling_parameters": '{"top_p": NaN}'}, {}),
    "broken chat": ("INVALID_JSON", {"messages": "[{"}, {}),
    "chat of words": ("INVALID_JSON", {"messages": ["hello"]}, {}),
    "deep chat": ("INVALID_JSON", {"messages": [{"role": "user", "content": DEEP}]}, {}),
    "broken extensions": ("INVALID_JSON", {"text_input": "a", "extensions": "{"}, {}),
    "half a character": ("INVALID_ENCODING", {"messages": '[{"role": "user", "content": "\\ud800"}]'}, {}),
    "unknown sampling": ("UNKNOWN_PARAMETER", {"text_input": "a", "sampling_parameters": {"temprature": 1}}, {}),
    "unknown extension": ("UNKNOWN_PARAMETER", {"text_input": "a", "extensions": {"anounce": True}}, {}),
    "unknown parameter": ("UNKNOWN_PARAMETER", {"text_input": "a"}, {"temprature": "1"}),
    "temperature": ("INVALID_VALUE", {"text_input": "a", "sampling_parameters": {"temperature": -1}}, {}),
    "max_tokens 0": ("INVALID_VALUE", {"text_input": "a", "sampling_parameters": {"max_tokens": 0}}, {}),
    "max_tokens parameter": ("INVALID_VALUE", {"text_input": "a"}, {"max_tokens": 0}),
    "sent twice": ("INVALID_VALUE", {"text_input": "a", "sampling_parameters": {"seed": 1}}, {"seed": 2}),
    "pin of a word": ("INVALID_VALUE", {"text_input": "a"}, {"version": "two"}),
    "attempt": ("INVALID_VALUE", {"text_input": "a", "extensions": {"attempt": {"cancel_token": "1.x"}}}, {}),
    "prompt of ids repeated": ("INVALID_VALUE", {"input_ids": [70000], "exclude_input_in_output": False}, {}),
    "context": ("CONTEXT_LENGTH_EXCEEDED", {"text_input": "a", "sampling_parameters": {"max_tokens": 10**6}}, {}),
    "token beyond the vocabulary": ("INVALID_TOKEN", {"input_ids": [2**62]}, {}),
    "negative token": ("INVALID_TOKEN", {"input_ids": [-1]}, {}),
    "output beyond the vocabulary": ("INVALID_TOKEN", {"text_input": "a", "output_ids": [2**62]}, {}),
    "too large": ("REQUEST_TOO_LARGE", {"text_input": "a" * (MAX_REQUEST_BYTES + 1)}, {}),
    "no such version": ("VERSION_NOT_FOUND", {"text_input": "a"}, {"version": 9}),
    "image": ("UNSUPPORTED", {"text_input": "a", "image": ["pixels"]}, {}),
    "embedding": ("UNSUPPORTED", {"embedding_request": "{}"}, {}),
    "adapter": ("UNSUPPORTED", {"text_input": "a", "sampling_parameters": {"lora_name": "x"}}, {}),
    "words of vLLM": ("UNSUPPORTED", {"text_input": "a", "sampling_parameters": {"bad_words": ["x"]}}, {}),
}


@pytest.fixture(autouse=True)
def still_serves(server: RunningServer) -> Iterator[None]:
    """After every bad input, a good one is answered."""
    yield
    assert answers_http(server)


def check(answer: Answer, entry: str, code: str) -> None:
    assert answer.code == code
    assert answer.error is not None
    assert len(answer.error.message) > 15
    kind = kind_of(ErrorCode(code))
    status = {"grpc_unary": kind.grpc, "http_infer": kind.http, "generate": 400, "generate_stream": 400}
    assert answer.status == status.get(entry)
    assert answer.responses == []


@pytest.mark.parametrize("entry", ENTRY_POINTS)
@pytest.mark.parametrize("case", BAD)
def test_bad_input(server: RunningServer, entry: str, case: str) -> None:
    code, inputs, parameters = BAD[case]

    check(ENTRY_POINTS[entry](server, {}, parameters, inputs), entry, code)


@pytest.mark.parametrize("entry", STREAMING)
@pytest.mark.parametrize("case", ["empty text", "temperature", "context", "no such version"])
def test_bad_input_with_stream(server: RunningServer, entry: str, case: str) -> None:
    code, inputs, parameters = BAD[case]

    check(ENTRY_POINTS[entry](server, {}, parameters, {**inputs, "stream": True}), entry, code)


@pytest.mark.parametrize("entry", ["grpc_stream", "grpc_aio_stream", "grpc_unary", "http_infer"])
@pytest.mark.parametrize("name", ["text_input", "sampling_parameters", "extensions", "messages"])
def test_bytes_that_are_not_utf8(server: RunningServer, entry: str, name: str) -> None:
    inputs = {"text_input": "a"} if name not in ("text_input", "messages") else {}
    answer = ENTRY_POINTS[entry](server, {}, {}, {**inputs, name: b"\xff\xfe"})

    check(answer, entry, "INVALID_ENCODING")


@pytest.mark.parametrize("entry", ["grpc_unary", "http_infer"])
def test_the_unary_model_does_not_stream(server: RunningServer, entry: str) -> None:
    check(ENTRY_POINTS[entry](server, {}, {}, {"text_input": "a", "stream": True}), entry, "INVALID_VALUE")


@pytest.mark.parametrize("entry", ENTRY_POINTS)
@pytest.mark.parametrize("code", [code for code in ErrorCode if kind_of(code).fault == "server"])
def test_failures_of_a_version_keep_their_code(server: RunningServer, entry: str, code: ErrorCode) -> None:
    script = {"tokens": 3, "delay_s": 0.0, "fail_at": 0, "error": code.value}
    answer = ENTRY_POINTS[entry](server, {}, {"version": 1}, {"text_input": "a", "extensions": {"script": script}})

    check(answer, entry, code.value)
    assert answer.error is not None
    assert answer.error.version == 1


@pytest.mark.parametrize("entry", STREAMING)
def test_an_error_within_a_stream(server: RunningServer, entry: str) -> None:
    script = {"tokens": 5, "delay_s": 0.0, "fail_at": 3, "error": "NUMERICAL_ERROR"}
    inputs = {"text_input": "a b c", "stream": True, "extensions": {"script": script}}
    answer = ENTRY_POINTS[entry](server, {}, {"version": 2}, inputs)

    assert answer.text == " a b c"
    assert answer.code == "NUMERICAL_ERROR"
    # The first event had gone out under 200.
    assert answer.status == (200 if entry == "generate_stream" else None)


def test_stable_is_missing(fresh_server: Any) -> None:
    server: RunningServer = fresh_server()
    server.service.stable_link.unlink()
    for entry in ENTRY_POINTS:
        check(ENTRY_POINTS[entry](server, {"X-Canary": "false"}, {}, {"text_input": "a"}), entry, "UNAVAILABLE")
    server.service.stable_link.symlink_to("1")
    assert ENTRY_POINTS["grpc_unary"](server, {"X-Canary": "false"}, {}, {"text_input": "a"}).version == 1


def test_the_router_called_itself(server: RunningServer) -> None:
    """Its input is what admission writes; a client's forgery is refused and tells nothing."""
    with grpcclient.InferenceServerClient(server.grpc) as client:
        tensor = grpcclient.InferInput("admitted", [1], "BYTES")
        for forged in (b"", b"{}", b'{"id": 1', b'{"id": "x", "extensions": {"attempt": 3}}', b"\xff"):
            tensor.set_data_from_numpy(np.array([forged], dtype=object))
            with pytest.raises(InferenceServerException, match="INVALID_JSON"):
                client.infer(server.service.router_unary, [tensor], client_timeout=60)


def post(server: RunningServer, path: str, body: bytes) -> int:
    request = urllib.request.Request(f"http://{server.http}/v2/models/{path}", body)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            status: int = answer.status
            return status
    except urllib.error.HTTPError as error:
        return error.code


def test_what_triton_refuses_itself_over_http(server: RunningServer) -> None:
    for body in (b"{", b"", b'{"text_input": "a", "stream": "yes"}', b'{"text_input": {"a": 1}}'):
        assert post(server, "deepseek/generate", body) in (400, 500), body
    assert post(server, "nothing/generate", b'{"text_input": "a"}') in (400, 404)
    assert post(server, "deepseek/versions/7/generate", b'{"text_input": "a"}') in (400, 404)
    with httpclient.InferenceServerClient(server.http) as client:
        tensor = httpclient.InferInput("text_input", [1], "BYTES")
        tensor.set_data_from_numpy(np.array([b"a"], dtype=object))
        with pytest.raises(InferenceServerException) as refused:
            client.infer("deepseek", [tensor])
    assert refused.value.status() == "501"


def test_what_triton_refuses_itself_over_grpc(server: RunningServer) -> None:
    unknown = grpcclient.InferInput("text", [1], "BYTES")
    unknown.set_data_from_numpy(np.array([b"a"], dtype=object))
    shape = grpcclient.InferInput("text_input", [2], "BYTES")
    shape.set_data_from_numpy(np.array([b"a", b"b"], dtype=object))
    kind = grpcclient.InferInput("stream", [1], "INT64")
    kind.set_data_from_numpy(np.array([1]))
    with grpcclient.InferenceServerClient(server.grpc) as client:
        for model, inputs, status in (
            ("deepseek_unary", [unknown], "INVALID_ARGUMENT"),
            ("deepseek_unary", [shape], "INVALID_ARGUMENT"),
            ("deepseek_unary", [kind], "INVALID_ARGUMENT"),
            ("nothing", grpc_inputs(text_input="a"), "NOT_FOUND"),
            ("deepseek", grpc_inputs(text_input="a"), "UNIMPLEMENTED"),
        ):
            with pytest.raises(InferenceServerException) as refused:
                client.infer(model, inputs, client_timeout=60)
            assert str(refused.value.status()) == f"StatusCode.{status}", (model, refused.value)
