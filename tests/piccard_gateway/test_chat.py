"""/v1/chat/completions over a generator with knobs."""

import asyncio
import json
from typing import Any

import pytest
from gateway_fakes import SECRET, FakeGateway, events
from patience import PATIENCE
from piccard_contract.errors import ERROR_KINDS, ErrorCode, RequestError
from piccard_contract.request import GatewayClaims

PATH = "/v1/chat/completions"
CHAT: dict[str, Any] = {"model": "deepseek", "messages": [{"role": "user", "content": "Hi"}]}


def test_a_whole_answer(gateway: FakeGateway) -> None:
    answer = gateway.post(PATH, CHAT, x_request_id="mine")
    body = answer.json()
    assert answer.status_code == 200
    assert body["object"] == "chat.completion"
    assert body["id"] == "chatcmpl-mine"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Hello world", "refusal": None}
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["total_tokens"] == 5
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    assert (answer.headers["x-served-version"], answer.headers["x-route-reason"]) == ("2", "header")
    assert answer.headers["x-request-id"] == "mine"


@pytest.mark.parametrize("usage", [True, False])
def test_a_stream(gateway: FakeGateway, usage: bool) -> None:
    answer = gateway.post(PATH, {**CHAT, "stream": True, "stream_options": {"include_usage": usage}, "n": 2})
    told = events(answer)
    assert answer.headers["x-served-version"] == "2"
    assert told.pop() == "[DONE]"
    if usage:
        last = told.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 4
    assert all(("usage" in item) == usage for item in told)
    for index in (0, 1):
        deltas = [item["choices"][0] for item in told if item["choices"][0]["index"] == index]
        assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(item["delta"].get("content", "") for item in deltas) == "Hello world"
        assert [item["finish_reason"] for item in deltas][-2:] == [None, "length"]


def test_reasoning_is_told_apart(gateway: FakeGateway) -> None:
    gateway.generator.reasoning = "let me see"
    message = gateway.post(PATH, CHAT).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("let me see", "Hello world")
    deltas = [item["choices"][0]["delta"] for item in events(gateway.post(PATH, {**CHAT, "stream": True}))[:-1]]
    assert {"reasoning_content": "let me see"} in deltas
    assert gateway.generator.asked[0].extensions["separate_reasoning"] is True


def test_log_probabilities(gateway: FakeGateway) -> None:
    body = {**CHAT, "logprobs": True, "top_logprobs": 1}
    first = gateway.post(PATH, body).json()["choices"][0]["logprobs"]["content"][0]
    assert (first["token"], first["logprob"], first["bytes"]) == ("Hello", -0.5, list(b"Hello"))
    assert [item["token"] for item in first["top_logprobs"]] == ["other"]
    streamed = events(gateway.post(PATH, {**body, "stream": True}))
    assert streamed[1]["choices"][0]["logprobs"]["content"] == [first]


def test_headers_become_parameters(gateway: FakeGateway) -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    gateway.post(PATH, {**CHAT, "user": "me"}, X_Canary="true", X_Session_Id="s", X_Request_Id="r", traceparent=trace)
    asked = gateway.generator.asked[0]
    assert asked.parameters == {
        "user": "me",
        "x-canary": "true",
        "x-session-id": "s",
        "x-request-id": "r",
        "traceparent": trace,
    }


def test_priority_is_signed(gateway: FakeGateway) -> None:
    gateway.post(PATH, CHAT, X_Priority="5")
    claims = GatewayClaims.model_validate(gateway.generator.asked[0].extensions["gateway"])
    assert claims.priority == 5
    assert claims.signed_by(SECRET)
    gateway.post(PATH, CHAT)
    assert "gateway" not in gateway.generator.asked[1].extensions


def test_a_chat_goes_on_to_the_context_s_end(gateway: FakeGateway) -> None:
    gateway.post(PATH, {**CHAT, "temperature": 0.5, "seed": 3, "stop": ["x"]})
    gateway.post(PATH, {**CHAT, "max_completion_tokens": 7})
    first, second = (asked.sampling for asked in gateway.generator.asked)
    assert first == {"temperature": 0.5, "seed": 3, "stop": ["x"], "max_tokens": None}
    assert second == {"max_tokens": 7}


@pytest.mark.parametrize(
    ("more", "status", "code", "param"),
    [
        ({"response_format": {"type": "json_object"}}, 422, "unsupported", "response_format"),
        ({"tools": [{"type": "function"}]}, 422, "unsupported", "tools"),
        ({"tempratur": 1}, 400, "unknown_parameter", "tempratur"),
        ({"temperature": -1}, 400, "invalid_value", "temperature"),
        ({"messages": []}, 400, "invalid_value", "messages"),
        ({"messages": [{}] * 1025}, 413, "request_too_large", "messages"),
        ({"model": "other"}, 404, "model_not_found", "model"),
        ({"top_logprobs": 2}, 400, "invalid_value", "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, 400, "invalid_value", "stream_options"),
        ({"extensions": {"gateway": {"priority": 9}}}, 400, "unknown_parameter", "extensions"),
    ],
)
def test_refusals(gateway: FakeGateway, more: dict[str, Any], status: int, code: str, param: str) -> None:
    answer = gateway.post(PATH, {**CHAT, **more})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
    assert error["type"] == "not_found_error" if status == 404 else "invalid_request_error"
    assert gateway.generator.asked == []


def test_what_asks_for_nothing_passes(gateway: FakeGateway) -> None:
    neutral = {"response_format": {"type": "text"}, "tools": [], "store": False, "metadata": None}
    neutral |= {"extensions": None, "prompt_logprobs": None, "detokenize": True, "n": None, "stream_options": None}
    assert gateway.post(PATH, {**CHAT, **neutral}).status_code == 200


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"model": "\\ud800"}', b"\xff", b"[" * 100_000])
def test_bodies_that_are_none(gateway: FakeGateway, body: bytes) -> None:
    answer = gateway.post(PATH, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("code", list(ErrorCode))
@pytest.mark.parametrize("stream", [True, False])
def test_a_failure_before_the_first_token_is_a_status(gateway: FakeGateway, code: ErrorCode, stream: bool) -> None:
    gateway.generator.fail = RequestError(code, "why", retry_after=1.2, version=2)
    answer = gateway.post(PATH, {**CHAT, "stream": stream})
    assert answer.status_code == ERROR_KINDS[code].gateway
    assert answer.json()["error"]["code"] == code.lower()
    assert answer.headers["retry-after"] == "2"
    assert answer.headers["x-served-version"] == "2"


def test_a_later_failure_is_an_event_and_the_end(gateway: FakeGateway) -> None:
    gateway.generator.fail, gateway.generator.fail_after = RequestError(ErrorCode.VERSION_DIED, "it died"), 1
    answer = gateway.post(PATH, {**CHAT, "stream": True})
    told = events(answer)
    assert answer.status_code == 200
    assert told[-1]["error"]["code"] == "version_died"
    assert "[DONE]" not in told


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_its_generation(gateway: FakeGateway, stream: bool) -> None:
    """No token comes any more: what ends it is the client's end alone."""
    gateway.generator.hang = True

    async def leave() -> None:
        gone, sent = asyncio.Event(), asyncio.Event()
        body = json.dumps({**CHAT, "stream": stream}).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.set()

        scope = {"type": "http", "method": "POST", "path": PATH, "raw_path": PATH.encode(), "query_string": b""}
        scope |= {"headers": [], "http_version": "1.1", "scheme": "http", "root_path": "", "server": ("gateway", 80)}
        running = asyncio.create_task(gateway.app(scope, receive, send))
        while not gateway.generator.asked or (stream and not sent.is_set()):
            await asyncio.sleep(0)
        gone.set()
        async with asyncio.timeout(PATIENCE):
            await gateway.generator.closed.wait()
            await running

    asyncio.run(leave())
