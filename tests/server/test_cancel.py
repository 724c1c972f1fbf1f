"""Cancels through a real server: by token from anywhere, and at once."""

import json
import time
from typing import Any

import pytest
from entry_points import ENTRY_POINTS
from piccard_contract.home import version_owner
from piccard_server import RunningServer, wait_for
from running_stream import RunningStream
from triton_calls import GrpcStream

ENDLESS = {"script": {"tokens": 30_000, "delay_s": 0.01}}
LATE = {"script": {"tokens": 30_000, "first_delay_s": 60.0}, "announce": True}


def idle(server: RunningServer) -> bool:
    """Whether nothing runs on either version and every block is free.

    A version that was stopped while it wrote its section, or that starts anew, has none to read for a moment.
    """
    sections = [server.section(version_owner(version)) for version in (1, 2)]
    return all(
        found is not None
        and found.data["running"] + found.data["waiting"] == 0
        and found.data["free_blocks"] == found.data["total_blocks"]
        for found in sections
    )


def start(server: RunningServer, extensions: dict[str, Any], canary: str = "true", **headers: str) -> RunningStream:
    """A stream that would run for minutes, after its first response."""
    return RunningStream(
        server.grpc,
        server.service.ensemble,
        headers={"x-canary": canary, **headers},
        text_input="a b c",
        sampling_parameters={"max_tokens": 30_000},
        extensions=extensions,
    ).wait_first()


def token_of(stream: RunningStream) -> str:
    token: str = stream.responses[0]["cancel_token"][0]
    return token


def cancel(server: RunningServer, token: str, entry: str = "grpc_stream") -> bool:
    answer = ENTRY_POINTS[entry](server, {}, {}, {"extensions": {"cancel": token}})
    assert answer.code == "OK", answer.error_text
    assert answer.text == ""
    cancelled: bool = answer.details["cancelled"]
    return cancelled


def check_ended(server: RunningServer, stream: RunningStream) -> None:
    stream.wait()
    assert stream.error is not None
    assert "[CANCELLED version=" in str(stream.error)
    # Blocks are told of twice a second.
    wait_for(lambda: idle(server), 60, "the versions to be idle")


@pytest.mark.parametrize("entry", ENTRY_POINTS)
@pytest.mark.parametrize("canary", ["true", "false"])
def test_a_token_ends_its_generation_from_any_entry_point(server: RunningServer, entry: str, canary: str) -> None:
    stream = start(server, ENDLESS, canary)

    assert cancel(server, token_of(stream), entry)
    check_ended(server, stream)
    assert not cancel(server, token_of(stream), entry)


def test_the_engine_ends_within_200_ms(server: RunningServer) -> None:
    """Told by the version's own tokens: at most 20 of its steps of 10 ms come after the answer to the cancel."""
    begun = time.monotonic()
    stream = start(server, ENDLESS)
    assert cancel(server, token_of(stream))
    # Tokens are made rightly until then, and a version that waits for a processor makes fewer.
    rightly = (time.monotonic() - begun) / 0.01

    check_ended(server, stream)
    assert len(stream.token_ids) <= rightly + 20


def test_an_announced_token_ends_what_has_no_token_yet(server: RunningServer) -> None:
    stream = start(server, LATE)
    assert stream.token_ids == []

    assert cancel(server, token_of(stream))
    check_ended(server, stream)


def test_a_token_of_no_generation(server: RunningServer) -> None:
    for token in ("1." + "a" * 32, "9." + "a" * 32, "nonsense", "1.x"):
        assert not cancel(server, token)


def test_an_announcement_without_stream_is_no_response_of_its_own(server: RunningServer) -> None:
    inputs = {"text_input": "a b", "extensions": {"announce": True, "script": {"tokens": 2}}}
    for entry in ("generate", "grpc_unary"):
        answer = ENTRY_POINTS[entry](server, {}, {}, inputs)
        assert len(answer.responses) == 1
        assert answer.text == "a b a b"


def test_cancelled_requests_are_counted(server: RunningServer) -> None:
    stream = start(server, ENDLESS, **{"x-request-id": "cancelled-and-counted"})
    cancel(server, token_of(stream))
    check_ended(server, stream)

    wait_for(lambda: "cancelled-and-counted" in cancelled_ids(server), 60, "its line")
    # Counts take some seconds from a router to the server's metrics; those of earlier tests come by then, too.
    wait_for(lambda: server.metric("piccard_cancels_total") == len(cancelled_ids(server)), 60, "the count")


def test_one_cancel_leaves_the_others_alone(server: RunningServer) -> None:
    with GrpcStream(server.grpc) as other:
        script = {"script": {"tokens": 60, "delay_s": 0.02}}
        other.send(
            server.service.ensemble,
            text_input="a",
            stream=True,
            extensions=script,
            sampling_parameters={"max_tokens": 100},
        )
        stream = start(server, ENDLESS)
        cancel(server, token_of(stream))
        check_stream = list(other.responses())
    stream.wait()

    assert sum(len(response["token_ids"]) for response in check_stream) == 60
    assert json.loads(check_stream[-1]["status"][0]) == {"code": "OK"}


def test_a_stuck_version_does_not_hold_a_cancelled_request(fresh_server: Any) -> None:
    """It neither sends nor hears; the router ends the request for its client, long before any deadline would."""
    import os
    import signal

    server: RunningServer = fresh_server(deadlines={"first_token": 600.0, "between_tokens": 600.0, "step": 600.0})
    stream = start(server, ENDLESS)
    pid = server.pid(version_owner(2))
    os.kill(pid, signal.SIGSTOP)
    try:
        cancel(server, token_of(stream))
        stream.wait()
        assert "[CANCELLED version=2" in str(stream.error)
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: idle(server), 60, "the versions to be idle")


def test_an_abandoned_stream_is_bounded(fresh_server: Any) -> None:
    """Its client is gone, which nobody sees through an ensemble."""
    server: RunningServer = fresh_server(abandoned_limit=2.0)
    stream = GrpcStream(server.grpc)
    stream.send(
        server.service.ensemble,
        text_input="a",
        stream=True,
        extensions=ENDLESS,
        sampling_parameters={"max_tokens": 30_000},
    )
    stream.next()
    stream.cancel()

    wait_for(lambda: idle(server), 60, "the abandoned stream to end")


def cancelled_ids(server: RunningServer) -> list[str]:
    """Ids of the requests that the routers' log tells as cancelled."""
    lines = server.service.request_log.read_text().splitlines()
    return [line["id"] for line in map(json.loads, lines) if line["code"] == "CANCELLED"]
