"""A version that is called itself, on a real server: it does with its tensors what Triton's vLLM backend does."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from piccard_contract.home import version_owner
from piccard_server import RunningServer, wait_for
from triton_calls import GrpcStream, Outputs, grpc_stream, http_generate, open_generate, text_of

LLM = "deepseek_llm"
ALWAYS = {"text_output", "token_ids", "served_version"}
ENDLESS = {"tokens": 30000, "delay_s": 0.005}


def call(server: RunningServer, **inputs: Any) -> list[Outputs]:
    return grpc_stream(server.grpc, LLM, version="1", **inputs)


def status_of(responses: list[Outputs]) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(responses[-1]["status"][0])
    return status


def used_blocks(server: RunningServer) -> int:
    report = server.report(version_owner(1))
    blocks: int = report["total_blocks"] - report["free_blocks"]
    return blocks


@pytest.fixture
def blocks_return(server: RunningServer) -> Iterator[None]:
    """Fails where a test leaves cache blocks in use."""
    yield
    _wait_for_blocks(server)


def test_without_stream_one_response_holds_prompt_and_text(server: RunningServer) -> None:
    (response,) = call(server, text_input="one two", sampling_parameters={"max_tokens": 3})
    assert response["text_output"] == ["one two one two one"]
    assert response["served_version"] == [1]
    assert response["route_reason"] == ["direct"]
    assert set(response) == ALWAYS | {"route_reason", "cancel_token", "status", "details"}


@pytest.mark.parametrize("exclude", [False, True])
def test_the_prompt_is_left_out_where_that_is_asked_for(server: RunningServer, exclude: bool) -> None:
    (response,) = call(
        server, text_input="one two", exclude_input_in_output=exclude, sampling_parameters={"max_tokens": 2}
    )
    assert response["text_output"] == [" one two" if exclude else "one two one two"]


def test_a_stream_never_repeats_the_prompt(server: RunningServer) -> None:
    responses = call(server, text_input="one two", stream=True, sampling_parameters={"max_tokens": 4})
    assert text_of(responses) == " one two one two"
    refused = call(server, text_input="one two", stream=True, exclude_input_in_output=False)
    assert status_of(refused)["code"] == "INVALID_VALUE"


@pytest.mark.parametrize(
    ("flag", "output", "values"),
    [
        ("return_finish_reason", "finish_reason", ["length"]),
        ("return_cumulative_logprob", "cumulative_logprob", [-0.75]),
        ("return_num_input_tokens", "num_input_tokens", [2]),
        ("return_num_output_tokens", "num_output_tokens", [3]),
        ("return_logprobs", "logprobs", ["null"]),
    ],
)
def test_these_outputs_come_only_when_they_are_asked_for(
    server: RunningServer, flag: str, output: str, values: list[Any]
) -> None:
    (response,) = call(server, text_input="one two", sampling_parameters={"max_tokens": 3}, **{flag: True})
    assert response[output] == values
    (response,) = call(server, text_input="one two", sampling_parameters={"max_tokens": 3}, **{flag: False})
    assert output not in response


def test_in_a_stream_they_tell_what_is_new(server: RunningServer) -> None:
    responses = call(
        server,
        text_input="one two",
        stream=True,
        return_finish_reason=True,
        return_num_output_tokens=True,
        return_cumulative_logprob=True,
        sampling_parameters={"max_tokens": 4},
    )
    assert [response["finish_reason"] for response in responses[:-1]] == [["None"]] * (len(responses) - 1)
    assert responses[-1]["finish_reason"] == ["length"]
    assert sum(response["num_output_tokens"][0] for response in responses) == 4
    assert responses[-1]["cumulative_logprob"] == [-1.0]
    assert [len(response["token_ids"]) for response in responses] == [
        response["num_output_tokens"][0] for response in responses
    ]


def test_log_probabilities_are_json_as_tritons_vllm_backend_writes_it(server: RunningServer) -> None:
    responses = call(
        server,
        text_input="one two",
        stream=True,
        return_logprobs=True,
        sampling_parameters={"max_tokens": 2, "logprobs": 1},
    )
    positions = [position for response in responses for position in json.loads(response["logprobs"][0])]
    ids = [token for response in responses for token in response["token_ids"]]
    assert len(positions) == 2
    for position, token in zip(positions, ids, strict=True):
        assert len(position) == 2
        assert set(position[str(token)]) == {"logprob", "rank", "decoded_token"}
    assert positions[0][str(ids[0])] == {"logprob": -0.25, "rank": 1, "decoded_token": " one"}


def test_choices_come_side_by_side(server: RunningServer) -> None:
    (response,) = call(
        server,
        text_input="one two",
        exclude_input_in_output=True,
        return_finish_reason=True,
        return_num_output_tokens=True,
        sampling_parameters={"n": 2, "max_tokens": 2},
    )
    assert response["text_output"] == [" one two", " two one"]
    assert response["finish_reason"] == ["length", "length"]
    assert response["num_output_tokens"] == [2, 2]
    assert json.loads(response["details"][0])["token_counts"] == [2, 2]


def test_chats_ids_and_resumed_requests(server: RunningServer) -> None:
    (chat,) = call(server, messages=[{"role": "user", "content": "hi"}], sampling_parameters={"max_tokens": 3})
    assert chat["text_output"] == [" user: hi assist"]
    (whole,) = call(server, text_input="one two", exclude_input_in_output=True)
    ids = whole["token_ids"]
    (rest,) = call(server, text_input="one two", exclude_input_in_output=True, output_ids=ids[:3])
    assert ids[:3] + rest["token_ids"] == ids
    (again,) = call(server, input_ids=ids[:2])
    assert len(again["token_ids"]) == 16


def test_generate_and_generate_stream(server: RunningServer) -> None:
    status, (body,) = http_generate(server.http, LLM, version="1", text_input="one two", max_tokens=3)
    assert (status, body["text_output"]) == (200, "one two one two one")
    status, events = http_generate(server.http, LLM, version="1", stream=True, text_input="one two", max_tokens=3)
    assert (status, "".join(event["text_output"] for event in events)) == (200, " one two one")
    assert json.loads(events[-1]["status"]) == {"code": "OK"}


@pytest.mark.parametrize(
    ("inputs", "code"),
    [
        ({}, "MISSING_INPUT"),
        ({"text_input": ""}, "MISSING_INPUT"),
        ({"text_input": b"\xff"}, "INVALID_ENCODING"),
        ({"text_input": "a", "input_ids": [1]}, "CONFLICTING_INPUTS"),
        ({"text_input": "a", "sampling_parameters": "{"}, "INVALID_JSON"),
        ({"text_input": "a", "sampling_parameters": {"maxtokens": 1}}, "UNKNOWN_PARAMETER"),
        ({"text_input": "a", "sampling_parameters": {"top_p": 2}}, "INVALID_VALUE"),
        ({"text_input": "a", "sampling_parameters": {"max_tokens": 10**6}}, "CONTEXT_LENGTH_EXCEEDED"),
        ({"input_ids": [2**60]}, "INVALID_TOKEN"),
        ({"text_input": "a", "image": [b"x"]}, "UNSUPPORTED"),
        ({"text_input": "a", "extensions": {"script": {"fail_at": 0}}}, "INTERNAL"),
        ({"text_input": "a", "extensions": {"script": {"fail_at": 3, "error": "NUMERICAL_ERROR"}}}, "NUMERICAL_ERROR"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_every_failure_is_data(server: RunningServer, inputs: dict[str, Any], code: str, stream: bool) -> None:
    responses = call(server, stream=stream, **inputs)
    assert status_of(responses)["code"] == code
    assert status_of(responses)["message"]
    assert text_of(call(server, text_input="well", sampling_parameters={"max_tokens": 1})) == "well well"


@pytest.mark.parametrize("stream", [False, True])
def test_over_http_a_failure_is_data_under_200(server: RunningServer, stream: bool) -> None:
    inputs = {"version": "1", "text_input": "a", "top_p": 2}
    status, bodies = http_generate(server.http, LLM, stream=stream, **inputs)

    assert status == 200
    assert json.loads(bodies[-1]["status"])["code"] == "INVALID_VALUE"


def test_many_streams_at_once_keep_their_texts_apart(server: RunningServer, blocks_return: None) -> None:
    streams = [GrpcStream(server.grpc) for _ in range(16)]
    for number, stream in enumerate(streams):
        script = {"tokens": 50, "delay_s": 0.001}
        stream.send(
            LLM,
            version="1",
            text_input=f"n{number}",
            stream=True,
            sampling_parameters={"max_tokens": 50},
            extensions={"script": script},
        )
    for number, stream in enumerate(streams):
        assert text_of(list(stream.responses())) == f" n{number}" * 50
        stream.__exit__()


def test_a_cancelled_grpc_stream_ends_its_generation(server: RunningServer, blocks_return: None) -> None:
    with GrpcStream(server.grpc) as stream:
        stream.send(
            LLM,
            version="1",
            text_input="a",
            stream=True,
            sampling_parameters={"max_tokens": 30000},
            extensions={"script": ENDLESS},
        )
        stream.next()
        wait_for(lambda: used_blocks(server) > 0, 60, "the request to run")
        stream.cancel()
        _wait_for_blocks(server)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_closed_http_stream_ends_its_generation(server: RunningServer, blocks_return: None, hangs: bool) -> None:
    # The server looks at a connection again once the first event was written, and never while /generate waits.
    answer = open_generate(
        server.http,
        LLM,
        version="1",
        stream=True,
        text_input="a",
        max_tokens=30000,
        extensions={"script": {**ENDLESS, "hang_at": 1 if hangs else None}},
    )
    answer.readline()
    wait_for(lambda: used_blocks(server) > 0, 60, "the request to run")
    answer.close()
    _wait_for_blocks(server)


def test_a_cancel_by_its_token_ends_the_generation(server: RunningServer, blocks_return: None) -> None:
    with GrpcStream(server.grpc) as stream:
        stream.send(
            LLM,
            version="1",
            text_input="a",
            stream=True,
            return_finish_reason=True,
            extensions={"script": {**ENDLESS, "hang_at": 3}, "announce": True},
        )
        first, _ = stream.next()
        (answer,) = call(server, extensions={"cancel": first["cancel_token"][0]})
        assert json.loads(answer["details"][0])["cancelled"] is True
        responses = list(stream.responses())
        assert status_of(responses)["code"] == "CANCELLED"
        assert responses[-1]["finish_reason"] == ["abort"]


def _wait_for_blocks(server: RunningServer) -> None:
    """Wait for all blocks to be free, and print how long that took, for the figures of a report."""
    started = time.monotonic()
    wait_for(lambda: used_blocks(server) == 0, 60, "the blocks to return")
    print(f"blocks back after {(time.monotonic() - started) * 1000:.0f} ms")
