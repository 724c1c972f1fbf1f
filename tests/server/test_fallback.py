"""A canary that fails on a real server, in every way and at every token: the client gets a whole answer."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from entry_points import ENTRY_POINTS, STREAMING, Answer
from piccard.policy_store import update_policy
from piccard_contract.home import version_owner
from piccard_server import RunningServer, wait_for
from running_stream import RunningStream

# Version 2 fails here by the dozen, each time at another token: a breaker would send all but the first five requests to
# stable at once, which is for test_breaker.py.
POLICY = {"breaker": {"consecutive_errors": None, "error_share": None}}
TOKENS = 8
# Long enough for a version on a busy machine, of which both ask a token in time.
SHORT = {"first_token": 4.0, "between_tokens": 4.0}
# Longer than any client of these tests waits.
NEVER = {"first_token": 600.0, "between_tokens": 600.0}
CASES = [(name, stream) for name in ENTRY_POINTS for stream in (False, True) if not stream or name in STREAMING]
over_entry_points = pytest.mark.parametrize(("entry", "stream"), CASES)


def script(**canary: Any) -> dict[str, Any]:
    """Eight tokens, tagged with the version that made each; version 2 plays `canary`."""
    return {"script": {"tokens": TOKENS, "delay_s": 0.01, "tag": True, "versions": {"2": canary}}}


def ask(
    server: RunningServer,
    entry: str,
    extensions: dict[str, Any],
    *,
    stream: bool = False,
    headers: dict[str, str] | None = None,
    parameters: dict[str, Any] | None = None,
    **inputs: Any,
) -> Answer:
    if stream:
        inputs["stream"] = True
    inputs |= {"text_input": "a b c", "extensions": extensions, "exclude_input_in_output": True}
    return ENTRY_POINTS[entry](server, headers or {"X-Canary": "true"}, parameters or {}, inputs)


def expected(at: int) -> str:
    """The first `at` words by version 2, the others by version 1."""
    return "".join(f" {'abc'[i % 3]}@{2 if i < at else 1}" for i in range(TOKENS))


def check_taken_over(answer: Answer, at: int, code: str) -> None:
    assert answer.code == "OK", answer.error_text
    assert answer.text == expected(at)
    assert len(answer.token_ids) == TOKENS
    assert (answer.version, answer.reason) == (1, "resumed" if at else "fallback")
    assert answer.details["route"] == {"decision": "header", "attempts": [{"version": 2, "code": code}]}
    assert answer.details["usage"]["completion_tokens"] == TOKENS


@over_entry_points
@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize("code", ["INTERNAL", "OUT_OF_MEMORY", "NUMERICAL_ERROR"])
def test_a_failing_canary_is_met_by_stable(server: RunningServer, entry: str, stream: bool, at: int, code: str) -> None:
    answer = ask(server, entry, script(fail_at=at, error=code), stream=stream)

    check_taken_over(answer, at, code)


def test_every_token_of_a_stream_tells_who_made_it(server: RunningServer) -> None:
    answer = ask(server, "grpc_stream", script(fail_at=3), stream=True)

    versions = [response["served_version"][0] for response in answer.responses]
    assert versions == sorted(versions, reverse=True)
    # Why is told by the first response of each version, and by the last.
    told = {index: r["route_reason"][0] for index, r in enumerate(answer.responses) if "route_reason" in r}
    assert {0, versions.index(1), len(versions) - 1} <= set(told)
    assert all(reason == ("header" if versions[index] == 2 else "resumed") for index, reason in told.items())


def test_sums_go_on_after_a_resume(server: RunningServer) -> None:
    inputs = {"return_cumulative_logprob": True, "return_num_output_tokens": True, "return_finish_reason": True}
    whole = ask(server, "grpc_stream", script(), stream=True, **inputs)
    resumed = ask(server, "grpc_stream", script(fail_at=4), stream=True, **inputs)

    for answer in (whole, resumed):
        assert sum(response["num_output_tokens"][0] for response in answer.responses) == TOKENS
        assert answer.responses[-1]["finish_reason"] == ["stop"]
    sums = [response["cumulative_logprob"][0] for response in resumed.responses]
    assert sums == sorted(sums, reverse=True)
    assert sums[-1] == whole.responses[-1]["cumulative_logprob"][0]


@pytest.mark.parametrize("entry", ["grpc_stream", "http_infer"])
@pytest.mark.parametrize("at", [0, 2])
def test_who_is_never_moved(server: RunningServer, entry: str, at: int) -> None:
    failing = {"script": {"tokens": TOKENS, "fail_at": at, "error": "OUT_OF_MEMORY"}}
    pinned = ask(server, entry, failing, parameters={"version": 2})
    kept = ask(server, entry, failing, headers={"X-Canary": "false"})

    assert pinned.error is not None
    assert (pinned.code, pinned.error.version) == ("OUT_OF_MEMORY", 2)
    assert kept.error is not None
    assert (kept.code, kept.error.version) == ("OUT_OF_MEMORY", 1)


def test_header_false_is_kept_from_the_canary_where_both_may_fall_back(fresh_server: Any) -> None:
    server: RunningServer = fresh_server(fallback_policy="both")
    stable_fails = {"script": {"tokens": TOKENS, "tag": True, "versions": {"1": {"fail_at": 2}}}}

    moved = ask(server, "grpc_stream", stable_fails, stream=True, headers={"X-Session-Id": stable_caller(server)})
    assert (moved.code, moved.version, moved.reason) == ("OK", 2, "resumed")
    kept = ask(server, "grpc_stream", stable_fails, stream=True, headers={"X-Canary": "false"})
    assert kept.code == "INTERNAL"


def test_several_choices_cannot_be_resumed(server: RunningServer) -> None:
    sampling = {"n": 2, "temperature": 1.0, "max_tokens": TOKENS}
    streamed = ask(server, "grpc_stream", script(fail_at=3), stream=True, sampling_parameters=sampling)
    assert streamed.code == "RESUME_IMPOSSIBLE"

    # Nothing was sent yet, so the other version begins anew.
    whole = ask(server, "grpc_stream", script(fail_at=3), sampling_parameters=sampling)
    assert (whole.code, whole.version, whole.reason) == ("OK", 1, "fallback")
    assert len(whole.responses[0]["text_output"]) == 2


@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_hanging_canary_misses_its_deadline(policy_server: RunningServer, at: int) -> None:
    server = policy_server
    update_policy(server.service, deadlines=SHORT)
    entries = (("grpc_stream", True), ("generate_stream", True), ("http_infer", False))
    with ThreadPoolExecutor(len(entries)) as pool:
        answers = pool.map(lambda entry: ask(server, entry[0], script(hang_at=at), stream=entry[1]), entries)
    for answer in answers:
        check_taken_over(answer, at, "DEADLINE_EXCEEDED")
    # The attempts that were given up are cancelled, and their blocks come back.
    wait_for(lambda: server.in_flight(2) == 0, 60, "version 2 to be idle")
    wait_for(lambda: "piccard_blocked_attempts" in server.metrics_text(), 60, "the gauge")
    wait_for(lambda: server.metric("piccard_blocked_attempts") == 0, 60, "blocked threads to end")


def test_a_hanging_version_without_a_successor_is_told(policy_server: RunningServer) -> None:
    server = policy_server
    update_policy(server.service, deadlines=SHORT, fallback_policy="none")
    answer = ask(server, "http_infer", script(hang_at=0))

    assert (answer.code, answer.status) == ("DEADLINE_EXCEEDED", 503)
    assert answer.error is not None
    assert answer.error.retry_after is not None


@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_canary_that_is_killed(fresh_server: Any, at: int) -> None:
    """kill -9 by its own script: every request is answered whole, on every kind of entry point."""
    # No deadline helps: it is the death that is noticed.
    server: RunningServer = fresh_server(deadlines=NEVER)
    for entry, stream in (("grpc_stream", True), ("http_infer", False), ("generate", False)):
        wait_for(lambda: server.version_ready(2), 60, "version 2 to be revived")
        wait_for(lambda: canary_answers(server), 60, "version 2 to answer")
        answer = ask(server, entry, script(die_at=at), stream=stream)
        # Tokens that were on their way died with it, such as those that were gathered for one answer.
        check_taken_over(answer, min(at, answer.text.count("@2")), "VERSION_DIED")


def test_many_streams_outlive_their_version(fresh_server: Any) -> None:
    """Each at another token, at which it waits: none is over before all have begun.

    A version that is killed while it sends can take this server with it (docs/operations.md), which is not tested here.
    """
    server: RunningServer = fresh_server(deadlines=NEVER)
    words = " ".join(f"w{n}" for n in range(30))
    streams = [
        RunningStream(
            server.grpc,
            server.service.ensemble,
            headers={"x-canary": "true"},
            text_input=words,
            sampling_parameters={"max_tokens": 30},
            extensions={"script": {"tokens": 30, "delay_s": 0.02, "versions": {"2": {"hang_at": at}}}},
        )
        for at in range(1, 17)
    ]
    for stream in streams:
        stream.wait_first()
    os.kill(server.pid(version_owner(2)), signal.SIGKILL)

    for stream in streams:
        stream.wait()
        assert stream.error is None, stream.error
        assert stream.status == "OK"
        assert stream.text.split() == words.split()
        assert stream.versions == {1, 2}
    # The router still works, and the canary comes back.
    wait_for(lambda: canary_answers(server), 60, "version 2 to be revived")


def stable_caller(server: RunningServer) -> str:
    from piccard_canary.sticky import position
    from piccard_contract.policy import read_policy

    salt = read_policy(server.service.policy_file).salt
    return next(f"s{n}" for n in range(1000) if position(salt, f"x-session-id:s{n}") >= 0.1)


def canary_answers(server: RunningServer) -> bool:
    answer = ask(server, "grpc_stream", script(), stream=True)
    return answer.code == "OK" and answer.version == 2
