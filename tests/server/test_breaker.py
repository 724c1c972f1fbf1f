"""A canary that fails on a real server: its breaker opens for all routers, and closes once it has recovered."""

import time
from collections.abc import Callable
from typing import Any

from entry_points import ENTRY_POINTS, STREAMING, Answer
from piccard_server import RunningServer, wait_for

FAILS = {"fail_at": 0, "error": "INTERNAL"}
LIMITS = {"consecutive_errors": 5, "open_for": 2.0, "probes": 2}


def ask(
    server: RunningServer, entry: str, canary: dict[str, Any], parameters: dict[str, Any] | None = None, **headers: str
) -> Answer:
    script = {"script": {"tokens": 3, "tag": True, "versions": {"2": canary}}}
    inputs: dict[str, Any] = {"text_input": "a b c", "extensions": script, "exclude_input_in_output": True}
    if entry in STREAMING:
        inputs["stream"] = True
    wish = {} if parameters else {"X-Canary": "true"}
    return ENTRY_POINTS[entry](server, wish | headers, parameters or {}, inputs)


def states(server: RunningServer) -> dict[str, str]:
    """State of version 2's breaker by router."""
    return {
        owner: server.report(owner)["breakers"].get("2", {}).get("state", "unknown")
        for owner in ("router", "router_unary")
    }


def test_it_opens_for_all_routers_and_closes_when_the_canary_recovers(
    fresh_server: Callable[..., RunningServer],
) -> None:
    server = fresh_server(breaker=LIMITS)
    reasons = []
    for _ in range(20):
        answer = ask(server, "grpc_stream", FAILS)
        assert (answer.code, answer.version) == ("OK", 1), answer.error_text
        reasons.append(answer.reason)
        if answer.reason == "breaker_open":
            break
    assert reasons == ["fallback"] * 5 + ["breaker_open"]

    # The other router met no failure and sends nothing to the canary all the same.
    wait_for(lambda: set(states(server).values()) <= {"open", "half_open"}, 60, "the other router to follow")
    status = server.piccard("status").stdout
    assert "version 2's breaker is" in status
    # Probes fail for as long as the canary does, and no client sees it.
    until = time.monotonic() + 3 * LIMITS["open_for"]
    seen = set()
    while time.monotonic() < until or len(seen) < 2:
        answer = ask(server, "http_infer", FAILS)
        assert (answer.code, answer.version) == ("OK", 1), answer.error_text
        seen.add(answer.reason)
    assert seen == {"breaker_open", "fallback"}

    # A pin is obeyed, and its failure told.
    pinned = ask(server, "http_infer", FAILS, {"version": 2})
    assert pinned.error is not None
    assert (pinned.code, pinned.error.version) == ("INTERNAL", 2)

    # The canary recovers: a probe of each router, and the breaker is closed for both.
    wait_for(lambda: ask(server, "grpc_stream", {}).version == 2, 60, "a probe")
    wait_for(lambda: ask(server, "http_infer", {}).version == 2, 60, "a second one")
    wait_for(lambda: set(states(server).values()) == {"closed"}, 60, "the breaker to close")
    for entry in ("grpc_stream", "http_infer"):
        answer = ask(server, entry, {})
        assert (answer.version, answer.reason) == (2, "header")
    opens, probes = "piccard_breaker_opens_total", "piccard_breaker_probes_total"
    wait_for(lambda: server.metric(opens, cause="probe") >= 1, 60, "the probes that failed")
    wait_for(lambda: server.metric(opens, version="2", cause="consecutive_errors") == 1, 60, "the opening")
    wait_for(lambda: server.metric(probes, outcome="passed") >= LIMITS["probes"], 60, "the probes that passed")
    wait_for(lambda: server.metric("piccard_breaker_open", version="2") == 0, 60, "the gauge")
    assert "breaker" not in server.piccard("status").stdout


def test_a_busy_stable_takes_over_no_more_than_its_budget(fresh_server: Callable[..., RunningServer]) -> None:
    # From load 0 on stable counts as busy; three of a minute are free.
    budget = {"ratio": 0.0, "min_per_second": 0.05, "window": 60.0, "load": 0.0}
    # Without a breaker, which would open by what is refused here and keep the last requests from the canary.
    never = {"consecutive_errors": None, "error_share": None}
    server = fresh_server(fallback_budget=budget, breaker=never)
    for _ in range(3):
        answer = ask(server, "grpc_stream", FAILS)
        assert (answer.code, answer.version, answer.reason) == ("OK", 1, "fallback"), answer.error_text
    for entry in ("grpc_stream", "generate"):
        refused = ask(server, entry, FAILS)
        assert refused.error is not None
        assert (refused.code, refused.error.version) == ("OVERLOADED", 2)
        assert refused.error.retry_after is not None

    # The other router hears of what this one took over.
    def refuses() -> bool:
        answer = ask(server, "http_infer", FAILS)
        return (answer.code, answer.status) == ("OVERLOADED", 503)

    wait_for(refuses, 60, "the other router to refuse")
    # Who is not moved is served, and a stream that has begun is brought to its end.
    assert ask(server, "grpc_stream", {}).version == 2
    resumed = ask(server, "grpc_stream", {"fail_at": 1})
    assert (resumed.code, resumed.reason) == ("OK", "resumed")
    wait_for(lambda: server.metric("piccard_fallback_refusals_total", version="2") >= 3, 60, "the counter")
