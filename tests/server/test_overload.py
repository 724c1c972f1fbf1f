"""A real engine with more to do than it can: what it refuses, or lets wait too long, is answered, and it is ready.

The versions are the demo checkpoint with profile latency: 16 sequences run, 128 may wait, each for 30 seconds. A
request of 16 choices takes all places. Version 1 has a cache for all that they may generate, version 2 for a fifteenth.
"""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from entry_points import ENTRY_POINTS, Answer
from patience import PATIENCE
from piccard.gateway_keys import add_key
from piccard.home_init import init_home
from piccard.policy_store import update_policy
from piccard_contract.errors import ErrorCode, parse_error
from piccard_contract.home import Service, version_owner
from piccard_contract.version_file import VersionFile
from piccard_server import RunningServer, wait_for
from running_stream import RunningStream
from short_calls import answers_gateway

DEMO = Path(__file__).parents[2] / "assets" / "demo"
SETTINGS = {"checkpoint": str(DEMO), "linked": True, "device": "cpu", "runner": "torch", "profile": "latency"}
CHOICES = 16
# Choices of the requests that fill the queue but for one place.
QUEUED = (*[CHOICES] * 7, CHOICES - 1)
# Minutes of tokens.
LONG = 4000
# Tokens of a block of the cache.
BLOCK = 16


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    home = tmp_path_factory.mktemp("overload") / "home"
    versions = {
        number: VersionFile.model_validate({"label": f"v{number}", "memory": memory, **SETTINGS})
        for number, memory in ((1, "256MiB"), (2, "23MiB"))
    }
    init_home(home, versions)
    update_policy(Service(home), traffic_ratio=0.0)
    running = RunningServer(home, "--gateway")
    try:
        running.wait_ready()
        wait_for(lambda: answers_gateway(running), PATIENCE, "the gateway")
        yield running
    finally:
        running.stop()


def start(server: RunningServer, max_tokens: int, version: int = 1, choices: int = CHOICES) -> RunningStream:
    """A request that takes as many places as it has choices."""
    return RunningStream(
        server.grpc,
        server.service.ensemble,
        parameters={"version": version},
        text_input="def",
        sampling_parameters={"n": choices, "max_tokens": max_tokens, "ignore_eos": True},
        timeout=600.0,
    )


def cancel(server: RunningServer, stream: RunningStream) -> None:
    """End a stream that has begun."""
    token = stream.responses[0]["cancel_token"][0]
    ENTRY_POINTS["http_infer"](server, {}, {}, {"extensions": {"cancel": token}})
    stream.wait()


@contextmanager
def held(server: RunningServer, version: int) -> Iterator[None]:
    """All places of a version are taken."""
    stream = start(server, LONG, version).wait_first()
    # The first token is one choice's: the others may still be on their way in.
    wait_for(lambda: server.report(version_owner(version))["running"] == CHOICES, PATIENCE, "all places taken")
    try:
        yield
        assert stream.running, stream.error
    finally:
        cancel(server, stream)
        wait_for(lambda: server.in_flight(version) == 0, PATIENCE, "an idle version")


def waiting(server: RunningServer) -> int:
    """Sequences in the queue of version 1."""
    count: int = server.report(version_owner(1))["waiting"]
    return count


def sample(server: RunningServer, version: int, name: str) -> float:
    """A metric of a version, as it reports it."""
    samples = server.report(version_owner(version))["samples"]
    value: float = next(value for found, _, value in samples if found == name)
    return value


def pressure(server: RunningServer, version: int) -> float:
    """Level of a version's cache."""
    return sample(server, version, "piccard_cache_pressure")


def refused_chat(server: RunningServer) -> openai.RateLimitError:
    """What the gateway says to a short request."""
    client = openai.OpenAI(base_url=f"http://{server.gateway}/v1", api_key="none", max_retries=0, timeout=600)
    with pytest.raises(openai.RateLimitError) as refused:
        client.completions.create(model="deepseek", prompt="def", max_tokens=1)
    return refused.value


def is_ready_and_says(server: RunningServer, why: str, version: int) -> bool:
    """Whether /readyz says yes and why the version gives no token."""
    status, body = server.get("readyz")
    assert status == 200, body
    told: dict[str, Any] = body["services"]["deepseek"]
    assert told["version"] == version
    return re.match(rf"\[OVERLOADED version={version} retry_after=[\d.]+\] .*{why}", told.get("reason", "")) is not None


def test_a_full_queue_and_a_long_wait_are_answered_and_told(server: RunningServer) -> None:
    with held(server, 1), ThreadPoolExecutor(1) as pool:
        queued = [start(server, 1, choices=choices) for choices in QUEUED]
        wait_for(lambda: waiting(server) == sum(QUEUED), PATIENCE, "the first of the queue")
        last = pool.submit(refused_chat, server)
        wait_for(lambda: waiting(server) == sum(QUEUED) + 1, PATIENCE, "a full queue")

        for entry in ("grpc_stream", "grpc_unary", "http_infer", "generate_stream"):
            inputs = {"text_input": "def", "sampling_parameters": {"max_tokens": 1}}
            error = ENTRY_POINTS[entry](server, {}, {}, inputs).error
            assert error is not None
            assert (error.code, error.version) == (ErrorCode.OVERLOADED, 1)
            assert error.retry_after is not None
            assert "128 sequences wait already" in error.message
        refused = refused_chat(server)
        assert "128 sequences wait already" in refused.message
        assert int(refused.response.headers["retry-after"]) >= 1
        wait_for(lambda: is_ready_and_says(server, "sequences wait already", 1), PATIENCE, "the reason in /readyz")
        assert server.get("readyz/deepseek")[0] == 200

        for stream in queued:
            stream.wait()
            late = parse_error(str(stream.error))
            assert late is not None, stream.error
            assert (late.code, late.version) == (ErrorCode.OVERLOADED, 1)
            assert late.retry_after is not None
            assert "waited 30 s for its first step" in late.message
        told = last.result()
        assert "waited 30 s for its first step" in told.message
        assert int(told.response.headers["retry-after"]) >= 1
    refused_late, refused_at_once = len(QUEUED) + 1, 5
    name = "piccard_engine_refusals_total"
    wait_for(lambda: server.metric(name, version="1") >= refused_late + refused_at_once, PATIENCE, "the count")


def test_a_full_cache_is_told_and_no_reason_to_send_requests_elsewhere(server: RunningServer) -> None:
    server.piccard("promote", "2")
    with held(server, 2):
        # Only now: before, the question would wait in the queue, for longer than it may.
        wait_for(lambda: pressure(server, 2) == 3.0, PATIENCE, "a full cache")
        assert is_ready_and_says(server, "cache is full", 2)
    assert server.get("readyz")[0] == 200


def test_a_cache_that_fills_up_refuses_long_prompts_before_short_ones(server: RunningServer) -> None:
    """Three sequences hold a little less than four fifths of the cache of version 2, and grow."""
    tokens = int(sample(server, 2, "piccard_cache_blocks")) * BLOCK
    sequences = [
        RunningStream(
            server.grpc,
            server.service.ensemble,
            parameters={"version": 2},
            text_input=f"{number}" + " x" * int(0.78 * tokens / 3),
            sampling_parameters={"max_tokens": int(0.2 * tokens / 3), "ignore_eos": True},
            timeout=600.0,
        )
        for number in range(3)
    ]

    def ask(words: int) -> Answer:
        inputs = {"text_input": "y" + " x" * words, "sampling_parameters": {"max_tokens": 1}}
        return ENTRY_POINTS["grpc_stream"](server, {}, {"version": 2}, inputs | {"stream": True})

    try:
        wait_for(lambda: pressure(server, 2) >= 1.0, 2 * PATIENCE, "a tight cache")
        wait_for(lambda: pressure(server, 2) >= 2.0, PATIENCE, "a scarce cache")
        long, short = ask(tokens // 16), ask(1)
        assert long.error is not None
        assert (long.error.code, long.error.version) == (ErrorCode.OVERLOADED, 2)
        assert long.error.retry_after is not None
        assert f"takes prompts of at most {tokens // 16} tokens for now" in long.error.message
        assert short.code == "OK", short.error_text
        assert all(sequence.running for sequence in sequences)
    finally:
        for sequence in sequences:
            cancel(server, sequence.wait_first())
    wait_for(lambda: pressure(server, 2) == 0.0, PATIENCE, "an empty cache")
    assert ask(tokens // 16).code == "OK"


def test_a_better_priority_at_the_gateway_goes_before_who_came_first(server: RunningServer) -> None:
    """Else it would wait for minutes, and be refused after thirty seconds. The last test: keys shut the door."""
    first = start(server, LONG).wait_first()
    wait_for(lambda: server.report(version_owner(1))["running"] == CHOICES, PATIENCE, "all places taken")

    def ask(key: str, max_tokens: int) -> Any:
        client = openai.OpenAI(base_url=f"http://{server.gateway}/v1", api_key=key, max_retries=0, timeout=600)
        more = {"ignore_eos": True, "version": 1}
        return client.completions.create(
            model="deepseek", prompt="def", n=CHOICES, max_tokens=max_tokens, stream=True, extra_body=more
        )

    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(ask, add_key(server.home, "batch", priority=50), LONG)
        wait_for(lambda: waiting(server) == CHOICES, PATIENCE, "the request of the worse priority")
        quick = pool.submit(lambda: list(ask(add_key(server.home, "live", priority=-50), 1)))
        wait_for(lambda: waiting(server) == 2 * CHOICES, PATIENCE, "that of the better one")
        cancel(server, first)
        reasons = [event.choices[0].finish_reason for event in quick.result(PATIENCE) if event.choices]
        assert reasons.count("length") == CHOICES
        # Its turn came next, and it goes away.
        slow.result(PATIENCE).close()
    wait_for(lambda: server.in_flight(1) == 0, PATIENCE, "an idle version")
