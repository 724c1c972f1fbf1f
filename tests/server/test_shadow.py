"""Shadow mode on a real server: clients hear stable alone, and the canary is compared with what they heard."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from entry_points import ENTRY_POINTS, STREAMING, Answer
from piccard.policy_store import update_policy
from piccard_contract.home import version_owner
from piccard_server import RunningServer, wait_for

TOKENS = 6
TEXT = " a b c a b c"
ENTRIES = ("grpc_stream", "generate", "http_infer")


def ask(server: RunningServer, entry: str, **canary: Any) -> Answer:
    """A request that stable serves, and that version 2 plays as `canary` says."""
    script = {"tokens": TOKENS, "versions": {"2": canary}}
    inputs: dict[str, Any] = {
        "text_input": "a b c",
        "extensions": {"script": script},
        "exclude_input_in_output": True,
    }
    if entry in STREAMING:
        inputs["stream"] = True
    answer = ENTRY_POINTS[entry](server, {}, {}, inputs)
    assert (answer.code, answer.version, answer.text) == ("OK", 1, TEXT), answer.error_text
    assert len(answer.token_ids) == TOKENS
    return answer


def mirrored(server: RunningServer, outcome: str) -> float:
    return server.metric("piccard_shadow_requests_total", version="2", outcome=outcome)


def idle(server: RunningServer, pairs: int) -> bool:
    """Whether so many pairs are whole at all routers, and nothing is under way."""
    told = [server.report(owner)["shadows"].get("2", {"pairs": 0}) for owner in ("router", "router_unary")]
    return sum(one["pairs"] for one in told) == pairs


def failed(server: RunningServer, number: int) -> bool:
    return mirrored(server, "failed") == number


def lines(server: RunningServer) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.service.request_log.read_text().splitlines()]


def test_the_canary_answers_too_and_no_client_notices(fresh_server: Callable[..., RunningServer]) -> None:
    server = fresh_server(traffic_ratio=0.0, shadow={"ratio": 1.0}, breaker={"consecutive_errors": 1})
    # The canary gets no copy while one is under way, for then it would be busier than stable.
    for number, entry in enumerate(ENTRIES):
        for sent in range(1, 6):
            # The last two go on as stable does up to the third word.
            ask(server, entry, **({"text": "a b x"} if sent > 3 else {}))
            wait_for(partial(idle, server, 5 * number + sent), 60, "the pair")
    wait_for(lambda: server.metric("piccard_shadow_pairs_total", tokens="differ") == 6, 60, "the pairs that differ")
    wait_for(lambda: mirrored(server, "pair") == 15, 60, "all pairs")
    # Series are exported one after the other; prometheus_client reads a counter that is not named so as x_total.
    wait_for(lambda: server.metric("piccard_shadow_pairs_total", tokens="agree") == 9, 60, "those that agree")
    wait_for(lambda: server.metric("piccard_shadow_first_difference_tokens_sum_total") == 12, 60, "positions")

    def told() -> str | None:
        out = server.piccard("status").stdout
        return out if "others differ from token 2 on (median)" in out else None

    assert "shadow: version 2 answered" in wait_for(told, 60, "the line of status")
    shadow = json.loads(server.piccard("status", "--json").stdout)["shadows"]["2"]
    assert shadow["compared"] - shadow["agreed"] == 6
    assert shadow["first_difference"] == 2

    # Both halves of a pair are in the log, under one id; the canary's has its latencies, their load and the mark.
    wait_for(lambda: sum(line["shadow"] is not None for line in lines(server)) == 15, 60, "the lines")
    served = {line["id"]: line for line in lines(server) if line["shadow"] is None}
    for line in lines(server):
        if line["shadow"] is None:
            assert line["version"] == 1
            continue
        assert (line["version"], line["decision"], line["code"]) == (2, None, "OK")
        assert line["shadow"]["of"] == 1
        assert line["shadow"]["first_token_s"] == served[line["id"]]["first_token_s"]
        assert min(line["first_token_s"], line["first_load"]) > 0

    # A canary that fails unheard harms nobody, and its breaker stays closed.
    for sent in range(1, 4):
        ask(server, "grpc_stream", fail_at=2)
        wait_for(partial(failed, server, sent), 60, "the failure")
    for name in ("piccard_attempt_failures_total", "piccard_fallbacks_total", "piccard_breaker_opens_total"):
        assert server.metric(name) == 0

    # The policy ends what is under way, also at the version.
    ask(server, "grpc_stream", hang_at=1)
    wait_for(lambda: server.report(version_owner(2))["running"] == 1, 60, "the mirrored request to run")
    update_policy(server.service, shadow={"ratio": 0.0})
    wait_for(lambda: mirrored(server, "cancelled") >= 1, 60, "its cancel")
    wait_for(lambda: server.in_flight(2) == 0, 60, "version 2 to be idle")
    before = mirrored(server, "pair")
    ask(server, "grpc_stream")
    wait_for(lambda: server.metric("piccard_requests_total", version="1") >= 20, 60, "the counters")
    assert mirrored(server, "pair") == before
