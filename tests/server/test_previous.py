"""A promoted version that fails on a real server, with the one before it still loaded: no caller hears of it."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from entry_points import ENTRY_POINTS, STREAMING, Answer
from piccard_contract.home import version_owner
from piccard_server import RunningServer, wait_for

TOKENS = 4
FAILS = {"fail_at": 0, "error": "INTERNAL"}
LIMITS = {"consecutive_errors": 5, "open_for": 2.0, "probes": 1}
NO_BREAKER = {"consecutive_errors": None, "error_share": None}
# Long enough for a version on a busy machine, of which each asks a token in time.
SHORT = {"first_token": 4.0, "between_tokens": 4.0}

FreshServer = Callable[..., RunningServer]


def ask(server: RunningServer, entry: str, new: dict[str, Any], **parameters: Any) -> Answer:
    """Four tokens, tagged with the version that made each; version 2 plays `new`."""
    script = {"script": {"tokens": TOKENS, "tag": True, "versions": {"2": new}}}
    inputs: dict[str, Any] = {"text_input": "a b c", "extensions": script, "exclude_input_in_output": True}
    if entry in STREAMING:
        inputs["stream"] = True
    return ENTRY_POINTS[entry](server, {}, parameters, inputs)


def expected(at: int) -> str:
    """The first `at` words by version 2, the others by version 1."""
    return "".join(f" {'abc'[i % 3]}@{2 if i < at else 1}" for i in range(TOKENS))


@pytest.fixture
def promoted(fresh_server: FreshServer) -> FreshServer:
    """Makes a server whose version 2 has just been promoted by hand; 1 is previous."""

    def make(**policy: Any) -> RunningServer:
        server = fresh_server(**policy)
        server.piccard("promote", "2")
        wait_for(lambda: ask(server, "grpc_stream", {}).version == 2, 60, "version 2 to be stable")
        return server

    return make


def test_previous_goes_on_with_what_stable_fails(promoted: FreshServer) -> None:
    server = promoted(breaker=NO_BREAKER, deadlines=SHORT)
    ways = [("fail_at", 0), ("fail_at", 2), ("hang_at", 0), ("hang_at", 1)]
    for entry, (way, at) in [(entry, way) for entry in ("grpc_stream", "http_infer") for way in ways]:
        answer = ask(server, entry, {way: at})
        assert answer.code == "OK", answer.error_text
        assert answer.text == expected(at)
        assert (answer.version, answer.reason) == (1, "resumed" if at else "fallback")
        code = "INTERNAL" if way == "fail_at" else "DEADLINE_EXCEEDED"
        assert answer.details["route"] == {"decision": "stable", "attempts": [{"version": 2, "code": code}]}

    # Who named the version hears what it says, and what previous was retired from goes to nobody else.
    pinned = ask(server, "grpc_stream", FAILS, version=2)
    assert pinned.error is not None
    assert (pinned.code, pinned.error.version) == ("INTERNAL", 2)
    server.piccard("retire", "1", "--force")
    alone = ask(server, "grpc_stream", FAILS)
    assert alone.error is not None
    assert (alone.code, alone.error.version) == ("INTERNAL", 2)


def test_the_breaker_of_stable_opens_until_it_recovers_and_a_rollback_ends_it(promoted: FreshServer) -> None:
    server = promoted(breaker=LIMITS)
    reasons = []
    while "breaker_open" not in reasons:
        answer = ask(server, "grpc_stream", FAILS)
        assert (answer.code, answer.version) == ("OK", 1), answer.error_text
        reasons.append(answer.reason)
    assert reasons == ["fallback"] * 5 + ["breaker_open"]
    status, told = server.get("readyz/deepseek")
    assert (status, told["version"]) == (200, 1)

    wait_for(lambda: ask(server, "grpc_stream", {}).version == 2, 60, "a probe of the version that recovered")
    answer = ask(server, "grpc_stream", {})
    assert (answer.version, answer.reason) == (2, "stable")

    server.piccard("rollback")
    wait_for(lambda: ask(server, "grpc_stream", {}).version == 1, 60, "version 1 to be stable")
    # Version 2 is what the service was taken back from.
    script = {"script": {"tokens": TOKENS, "versions": {"1": FAILS}}}
    inputs = {"text_input": "a b c", "stream": True, "extensions": script}
    failed = ENTRY_POINTS["grpc_stream"](server, {}, {}, inputs)
    assert failed.error is not None
    assert (failed.code, failed.error.version) == ("INTERNAL", 1)


def test_previous_serves_while_a_stable_that_was_killed_is_started_again(promoted: FreshServer) -> None:
    server = promoted()
    os.kill(server.pid(version_owner(2)), signal.SIGKILL)
    answers = []

    def back() -> bool:
        answers.append(ask(server, "grpc_stream", {}))
        return answers[-1].code == "OK" and answers[-1].version == 2

    wait_for(back, 60, "version 2 to be started again")
    assert {answer.code for answer in answers} == {"OK"}
    assert {answer.reason for answer in answers if answer.version == 1} <= {"fallback", "resumed", "breaker_open"}
    assert len(answers) > 1
