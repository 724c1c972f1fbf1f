"""Where requests go, over every entry point of a real server."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from entry_points import ENTRY_POINTS, STREAMING, Answer
from piccard.policy_store import update_policy
from piccard_canary.sticky import position
from piccard_server import RunningServer, wait_for
from triton_calls import GrpcStream, http_generate

# Two tokens, each of which says which version made it.
TAGGED = {"script": {"tokens": 2, "delay_s": 0.0, "tag": True}}

CASES = [(name, stream) for name in ENTRY_POINTS for stream in (False, True) if not stream or name in STREAMING]
over_entry_points = pytest.mark.parametrize(("entry", "stream"), CASES)


def ask(
    server: RunningServer,
    entry: str,
    *,
    stream: bool = False,
    headers: dict[str, str] | None = None,
    parameters: dict[str, Any] | None = None,
) -> Answer:
    """Two words, which come back tagged with the version that said them."""
    inputs: dict[str, Any] = {"text_input": "one two", "extensions": TAGGED, "exclude_input_in_output": True}
    if stream:
        inputs["stream"] = True
    answer = ENTRY_POINTS[entry](server, headers or {}, parameters or {}, inputs)
    assert answer.code == "OK", answer.error_text
    assert answer.text == f" one@{answer.version} two@{answer.version}"
    # Every response tells the same version, the first and the last why; they are one where no stream was asked for.
    assert {response["served_version"][0] for response in answer.responses} == {answer.version}
    assert answer.responses[0]["route_reason"] == answer.responses[-1]["route_reason"]
    assert len(answer.responses) == 1 or stream
    return answer


@over_entry_points
@pytest.mark.parametrize(
    ("value", "version"),
    [("true", 2), ("Always", 2), ("false", 1), ("never", 1)],
    ids=["true", "Always", "false", "never"],
)
def test_by_header(server: RunningServer, entry: str, stream: bool, value: str, version: int) -> None:
    answer = ask(server, entry, stream=stream, headers={"X-Canary": value})

    assert (answer.version, answer.reason) == (version, "header")


def test_generate_has_its_keys_in_the_body_alone(policy_server: RunningServer) -> None:
    """Triton keeps the HTTP headers of /generate* to itself; with no ratio nothing else leads to the canary."""
    server = policy_server
    update_policy(server.service, traffic_ratio=0.0)
    inputs = {"text_input": "one two", "extensions": TAGGED}
    for stream in (False, True):
        for headers, keys, version, reason in (
            ({"X-Canary": "true"}, {}, 1, "ratio"),
            ({"X-Canary": "true", "X-Session-Id": "someone", "version": "2"}, {}, 1, "ratio"),
            ({}, {"X-Canary": "true"}, 2, "header"),
            ({"X-Canary": "true"}, {"X-Canary": "false"}, 1, "header"),
        ):
            status, answers = http_generate(
                server.http, server.service.ensemble, stream=stream, headers=headers, **inputs, **keys
            )
            assert status == 200
            assert {answer["served_version"] for answer in answers} == {version}
            assert answers[-1]["route_reason"] == reason
    # The same header on an entry point that hands it on.
    answer = ENTRY_POINTS["http_infer"](server, {"X-Canary": "true"}, {}, inputs)
    assert (answer.version, answer.reason) == (2, "header")


@over_entry_points
def test_by_pin(server: RunningServer, entry: str, stream: bool) -> None:
    for version in (1, 2):
        answer = ask(server, entry, stream=stream, headers={"X-Canary": "false"}, parameters={"version": version})
        assert (answer.version, answer.reason) == (version, "pin")


@over_entry_points
@pytest.mark.parametrize("key", ["X-Session-Id", "x-session-id"])
def test_by_sticky_key(server: RunningServer, entry: str, stream: bool, key: str) -> None:
    salt = server_salt(server)
    for caller in callers(salt):
        answer = ask(server, entry, stream=stream, headers={key: caller, "X-Canary": "neither"})
        expected = 2 if position(salt, f"x-session-id:{caller}") < 0.1 else 1
        assert (answer.version, answer.reason) == (expected, "sticky")


@pytest.mark.parametrize(("entry", "name"), [("generate", "user"), ("http_infer", "X-User"), ("grpc_stream", "X-User")])
def test_by_user(server: RunningServer, entry: str, name: str) -> None:
    salt = server_salt(server)
    caller = next(f"u{n}" for n in range(1000) if position(salt, f"user:u{n}") < 0.1)

    assert (ask(server, entry, headers={name: caller}).version) == 2


@over_entry_points
def test_by_ratio(server: RunningServer, entry: str, stream: bool) -> None:
    assert ask(server, entry, stream=stream).reason == "ratio"


def test_ten_percent_of_two_thousand(server: RunningServer) -> None:
    """Within 5 standard deviations of a binomial: 200 ± 67."""
    counts = {1: 0, 2: 0}
    lock = threading.Lock()

    def run(number: int) -> None:
        with GrpcStream(server.grpc) as stream:
            for _ in range(number):
                stream.send(
                    "deepseek", text_input="x", stream=True, extensions={"script": {"tokens": 1, "delay_s": 0.0}}
                )
                (response,) = stream.responses()
                assert response["route_reason"] == ["ratio"]
                with lock:
                    counts[response["served_version"][0]] += 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, [250] * 8))

    deviation = math.sqrt(2000 * 0.1 * 0.9)
    assert counts[1] + counts[2] == 2000
    assert abs(counts[2] - 200) <= 5 * deviation, counts


def test_raising_the_ratio_moves_nobody_back(policy_server: RunningServer) -> None:
    server = policy_server
    names = [f"caller-{number}" for number in range(40)]
    before: set[str] = set()
    for ratio in (0.1, 0.3, 0.6, 1.0):
        update_policy(server.service, traffic_ratio=ratio)
        now = {name for name in names if ask(server, "generate", headers={"X-Session-Id": name}).version == 2}
        assert before <= now
        before = now
    assert before == set(names)

    # A new salt deals everyone a new place.
    update_policy(server.service, traffic_ratio=0.5, salt="another rollout")
    again = {name for name in names if ask(server, "generate", headers={"X-Session-Id": name}).version == 2}
    assert again == {name for name in names if position("another rollout", f"x-session-id:{name}") < 0.5}


def test_a_changed_policy_acts_on_the_next_request(policy_server: RunningServer) -> None:
    server = policy_server
    with GrpcStream(server.grpc) as running:
        # This one keeps the policy that it started with.
        running.send(
            "deepseek",
            text_input="x",
            stream=True,
            parameters={"version": 2},
            extensions={"script": {"tokens": 40, "delay_s": 0.02}},
        )
        running.next()
        for canary, ratio, version in ((None, 0.0, 1), (2, 1.0, 2), (2, 0.0, 1)):
            update_policy(server.service, canary=canary, traffic_ratio=ratio)
            assert {ask(server, "generate").version for _ in range(5)} == {version}
        update_policy(server.service, pin={"allowed": False})
        refused = ENTRY_POINTS["http_infer"](server, {}, {"version": 1}, {"text_input": "x"})
        assert (refused.code, refused.status) == ("INVALID_VALUE", 400)
        assert {response["served_version"][0] for response in running.responses()} == {2}


def test_a_broken_policy_keeps_the_last_good_one(policy_server: RunningServer) -> None:
    server = policy_server
    update_policy(server.service, canary=2, traffic_ratio=1.0)
    # It is the last good one once somebody has read it.
    assert ask(server, "generate").version == 2
    good = server.service.policy_file.read_text()
    server.service.policy_file.write_text("traffic_ratio: lots\n")

    assert ask(server, "generate").version == 2
    # Read between the two halves of the write it is first told as empty.
    wait_for(lambda: "traffic_ratio" in policy_error(server), 60, "the error to be told")

    server.service.policy_file.write_text(good)
    wait_for(lambda: not policy_error(server), 60, "the error to be taken back")


def test_no_canary_is_loaded(fresh_server: Any) -> None:
    server: RunningServer = fresh_server(versions=1)
    update_policy(server.service, canary=2, traffic_ratio=1.0)

    for entry in ("grpc_stream", "http_infer"):
        assert ask(server, entry, headers={"X-Canary": "true"}).reason == "canary_unavailable"
        assert ask(server, entry).reason == "canary_unavailable"


def server_salt(server: RunningServer) -> str:
    from piccard_contract.policy import read_policy

    return read_policy(server.service.policy_file).salt


def callers(salt: str) -> list[str]:
    """One who belongs to the canary and one who does not."""
    names = [f"s{number}" for number in range(1000)]
    canary = next(name for name in names if position(salt, f"x-session-id:{name}") < 0.1)
    stable = next(name for name in names if position(salt, f"x-session-id:{name}") >= 0.1)
    return [canary, stable]


def policy_error(server: RunningServer) -> str:
    error: str = server.report("admission")["policy_error"]
    return error
