"""What a client is told when the gateway ends before its answer does."""

import asyncio
import json
from typing import Any

import pytest
from gateway_fakes import FakeGateway, FakeGenerator


def cut_off(gateway: FakeGateway, *, stream: bool, after: int) -> list[dict[str, Any]]:
    """What is sent of a completion whose task is cancelled after so many messages, as a server that ends does."""
    body = json.dumps({"model": "deepseek", "prompt": "a", "stream": stream}).encode()
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [],
        "root_path": "",
    }
    sent: list[dict[str, Any]] = []

    async def run() -> None:
        read = False

        async def receive() -> dict[str, Any]:
            nonlocal read
            if read:
                await asyncio.Event().wait()
            read = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        task = asyncio.create_task(gateway.app(scope, receive, send))
        async with asyncio.timeout(60):
            while len(sent) < after or not gateway.generator.asked:
                await asyncio.sleep(0.001)
            task.cancel()
            await task
            await gateway.generator.closed.wait()

    asyncio.run(run())
    return sent


@pytest.fixture
def generator() -> FakeGenerator:
    return FakeGenerator(hang=True)


def test_a_stream_ends_with_an_error_event(gateway: FakeGateway) -> None:
    # Its start and two words.
    sent = cut_off(gateway, stream=True, after=3)
    assert [message["type"] for message in sent] == ["http.response.start"] + ["http.response.body"] * 4
    told = json.loads(sent[3]["body"].removeprefix(b"data: "))
    assert (told["error"]["code"], told["error"]["type"]) == ("unavailable", "service_unavailable_error")
    assert sent[4] == {"type": "http.response.body", "body": b""}


def test_an_answer_that_was_not_begun_is_a_refusal(gateway: FakeGateway) -> None:
    start, body = cut_off(gateway, stream=False, after=0)
    assert start["status"] == 503
    assert (b"retry-after", b"1") in start["headers"]
    assert json.loads(body["body"])["error"]["code"] == "unavailable"
