"""Limits of tokens on a real server: who asks for too much is told when to come again, and nobody else is."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from entry_points import ENTRY_POINTS, Answer
from patience import PATIENCE
from piccard.gateway_keys import add_key
from piccard.keys import read_secret
from piccard.policy_store import update_policy
from piccard_contract.home import version_owner
from piccard_contract.request import GatewayClaims
from piccard_server import RunningServer, make_scripted_home, wait_for
from short_calls import answers_gateway

# So slow an inflow that it decides nothing within a test. Without load a bucket holds half as much again.
EACH = {"tokens_per_second": 1, "burst": 1000}
MOST = 1500
ASKED = 400


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One version, a gateway, and a bucket for each tenant; every test has tenants of its own."""
    service = make_scripted_home(tmp_path_factory.mktemp("home"), versions=1, admission={"each": EACH})
    running = RunningServer(service.home, "--gateway")
    try:
        running.wait_ready()
        wait_for(lambda: answers_gateway(running), PATIENCE, "the gateway")
        yield running
    finally:
        running.stop()


def script(tokens: int = 500) -> dict[str, Any]:
    return {"tokens": tokens, "delay_s": 0.0}


def ask(server: RunningServer, tenant: str, *, max_tokens: int = ASKED, tokens: int = 500, entry: str = "") -> Answer:
    """A request in the name of a tenant that generates `tokens`, but no more than `max_tokens`."""
    secret = read_secret(server.service.gateway_secret).encode()
    claims = GatewayClaims(tenant=tenant).sign(secret).model_dump()
    inputs = {
        "text_input": "a b c",
        "sampling_parameters": {"max_tokens": max_tokens},
        "extensions": {"gateway": claims, "script": script(tokens)},
    }
    if entry in ("", "generate_stream"):
        inputs["stream"] = True
    return ENTRY_POINTS[entry or "grpc_stream"](server, {}, {}, inputs)


def refusal(server: RunningServer, tenant: str, **options: Any) -> Answer:
    """The first answer to a flood of a tenant's requests that is a refusal."""
    for _ in range(2 * MOST // ASKED):
        answer = ask(server, tenant, **options)
        if answer.error is not None:
            return answer
    raise AssertionError(f"{tenant} was never refused")


@pytest.mark.parametrize("entry", ["grpc_stream", "grpc_unary", "http_infer", "generate_stream"])
def test_a_flood_is_refused_with_the_time_to_wait_and_others_are_served(server: RunningServer, entry: str) -> None:
    answer = refusal(server, f"flood of {entry}", entry=entry)
    assert answer.error is not None
    assert answer.error_text is not None
    assert f"[OVERLOADED retry_after={answer.error.retry_after:g}] the request asks for about 40" in answer.error_text
    # Some hundred tokens are missing, of which one and a bit come in a second.
    assert answer.error.retry_after is not None
    assert 10 < answer.error.retry_after < ASKED
    assert answer.status == {"grpc_unary": "UNAVAILABLE", "http_infer": 503}.get(entry, answer.status)
    assert ask(server, f"calm beside {entry}", entry=entry).code == "OK"
    assert server.get("readyz")[0] == 200


def test_what_a_bucket_never_holds_is_refused_for_good(server: RunningServer) -> None:
    error = ask(server, "large", max_tokens=MOST).error
    assert error is not None
    assert (error.code, error.retry_after) == ("REQUEST_TOO_LARGE", None)
    assert "lower max_tokens" in error.message
    assert ask(server, "large", max_tokens=MOST - 10, tokens=3).code == "OK"


def test_what_a_request_did_not_come_to_is_given_back(server: RunningServer) -> None:
    """Ten times what the bucket holds is asked for, and a hundredth of that is generated."""
    done = 0

    def look() -> bool:
        nonlocal done
        done += ask(server, "frugal", max_tokens=MOST - 100, tokens=10).code == "OK"
        return done == 10

    wait_for(look, PATIENCE, f"what was given back; {done} of 10 were served")


def test_versions_learn_how_many_bytes_a_token_has(server: RunningServer) -> None:
    assert ask(server, "reader", max_tokens=1).code == "OK"
    owner = version_owner(1)
    wait_for(lambda: server.report(owner)["bytes_per_token"] != 4.0, PATIENCE, "the ratio")
    assert 1.0 <= server.report(owner)["bytes_per_token"] < 4.0


def test_at_the_gateway(server: RunningServer) -> None:
    keys = {name: add_key(server.home, name, tenant=name) for name in ("eager", "patient")}

    def chat(name: str, max_tokens: int = ASKED) -> Any:
        client = openai.OpenAI(base_url=f"http://{server.gateway}/v1", api_key=keys[name], max_retries=0, timeout=60)
        messages: Any = [{"role": "user", "content": "a b c"}]
        more = {"extensions": {"script": script()}}
        return client.chat.completions.create(
            model="deepseek", messages=messages, max_tokens=max_tokens, extra_body=more
        )

    def flood() -> None:
        for _ in range(2 * MOST // ASKED):
            chat("eager")

    with pytest.raises(openai.RateLimitError) as refused:
        flood()
    assert refused.value.status_code == 429
    assert refused.value.code == "overloaded"
    assert 10 < int(refused.value.response.headers["retry-after"]) < ASKED
    assert chat("patient").choices[0].finish_reason == "length"
    with pytest.raises(openai.APIStatusError) as refused_for_good:
        chat("patient", 2 * MOST)
    assert refused_for_good.value.status_code == 413
    assert "retry-after" not in refused_for_good.value.response.headers
    told = server.piccard("key", "add", "me", "--tenant=@piccard", check=False)
    assert told.returncode == 2
    assert "the service itself" in told.stdout + told.stderr


def test_without_tokens_for_anybody_the_service_is_ready_and_publishes(server: RunningServer) -> None:
    update_policy(server.service, admission={"tokens_per_second": 1, "burst": 500})
    before = server.metric("piccard_token_refusals_total", bucket="all")
    assert before == 0
    refusal(server, "first")
    # What the first did not come to is little, and given back by now or never.
    for tenant in ("second", ""):
        error = ask(server, tenant).error
        assert error is not None
        assert "all tenants together" in error.message
    assert server.get("readyz")[0] == 200
    server.piccard("publish", "scripted", "--runner=scripted", "--linked", "--label=v2.0.0")
    wait_for(lambda: server.metric("piccard_token_refusals_total", bucket="all") >= 3, PATIENCE, "the count")
    assert server.metric("piccard_refusals_total", code="OVERLOADED") > 3
    assert server.metric("piccard_token_refusals_total", bucket="tenant") > 3
    level, capacity = (server.metric(f"piccard_token_bucket_{name}") for name in ("level", "capacity"))
    assert 0 <= level < ASKED < capacity <= 750
    assert server.get("readyz")[0] == 200
    update_policy(server.service, admission={})
    assert all(ask(server, "first").code == "OK" for _ in range(4))
