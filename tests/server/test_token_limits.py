"""Limits of tokens on a real server: who asks for too much is told when to come again, and nobody else is."""

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from entry_points import ENTRY_POINTS, Answer
from patience import PATIENCE
from piccard.gateway_keys import add_key
from piccard.keys import read_secret
from piccard.policy_store import update_policy
from piccard_contract.errors import parse_error
from piccard_contract.home import version_owner
from piccard_contract.request import GatewayClaims
from piccard_server import RunningServer, make_scripted_home, wait_for
from short_calls import answers_gateway

# So slow an inflow that it decides nothing within a test; without load a bucket holds half as much again.
EACH = {"tokens_per_second": 1, "burst": 1000}
MOST = 1500
WAITS_FOR_EVER: dict[str, Any] = {"tokens": 500, "delay_s": 0.0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """With a gateway, and a key of tenant `keyed` and of tenant `other`."""
    service = make_scripted_home(tmp_path_factory.mktemp("home"), versions=1, admission={"each": EACH})
    running = RunningServer(service.home, "--gateway")
    try:
        running.wait_ready()
        wait_for(lambda: answers_gateway(running), PATIENCE, "the gateway")
        yield running
    finally:
        running.stop()


def ask(server: RunningServer, tenant: str, max_tokens: int = 400, tokens: int = 500, entry: str = "grpc_stream") -> Answer:
    """A request in the name of a tenant; it generates `tokens`, but no more than `max_tokens`."""
    secret = read_secret(server.service.gateway_secret).encode()
    claims = GatewayClaims(tenant=tenant).sign(secret).model_dump()
    script = {"tokens": tokens, "delay_s": 0.0}
    inputs = {
        "text_input": "a b c",
        "sampling_parameters": {"max_tokens": max_tokens},
        "extensions": {"gateway": claims, "script": script},
    }
    if entry in ("grpc_stream", "generate_stream"):
        inputs["stream"] = True
    return ENTRY_POINTS[entry](server, {}, {}, inputs)


def flood(server: RunningServer, tenant: str, entry: str = "grpc_stream") -> Answer:
    """Ask until one is refused, which is told."""
    for _ in range(2 * MOST // 400):
        answer = ask(server, tenant, entry=entry)
        if answer.code != "OK":
            return answer
    raise AssertionError(f"{tenant} was never refused")
