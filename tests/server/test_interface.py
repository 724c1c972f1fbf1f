"""What Triton's vLLM backend does with its tensors, the service does too, through both ensembles."""

import json
from typing import Any

import pytest
from entry_points import ENTRY_POINTS, STREAMING, Answer
from piccard_contract.tensors import GENERATE_OUTPUTS, VLLM_OUTPUTS
from piccard_server import RunningServer, wait_for
from triton_calls import GrpcStream, grpc_inputs

FLAGS = {
    "return_finish_reason": "finish_reason",
    "return_cumulative_logprob": "cumulative_logprob",
    "return_logprobs": "logprobs",
    "return_num_input_tokens": "num_input_tokens",
    "return_num_output_tokens": "num_output_tokens",
}
ALWAYS = {"text_output", "token_ids", "served_version"}
ENDS = {"route_reason", "cancel_token"}
LAST = {"status", "details"}
NAMES = {spec.name for spec in GENERATE_OUTPUTS}
CASES = [(name, stream) for name in ENTRY_POINTS for stream in (False, True) if not stream or name in STREAMING]
over_entry_points = pytest.mark.parametrize(("entry", "stream"), CASES)


def ask(server: RunningServer, entry: str, *, stream: bool = False, words: str = "a b c", **inputs: Any) -> Answer:
    if stream:
        inputs["stream"] = True
    answer = ENTRY_POINTS[entry](server, {}, {}, {"text_input": words, **inputs})
    assert answer.code == "OK", answer.error_text
    # /generate adds names of its own.
    answer.responses = [{k: v for k, v in response.items() if k in NAMES} for response in answer.responses]
    return answer


@over_entry_points
def test_one_response_without_stream_many_with(server: RunningServer, entry: str, stream: bool) -> None:
    # Tokens that come while a response waits for its turn go into it, so that they must not come at once.
    script = {"delay_s": 0.2 if stream else 0.0}
    answer = ask(server, entry, stream=stream, sampling_parameters={"max_tokens": 5}, extensions={"script": script})

    assert answer.text == ("" if stream else "a b c") + " a b c a b"
    assert len(answer.token_ids) == 5
    assert (len(answer.responses) > 1) == stream
    if stream:
        assert set(answer.responses[0]) == ALWAYS | ENDS
    for response in answer.responses[1:-1]:
        assert set(response) == ALWAYS
    assert set(answer.responses[-1]) == ALWAYS | ENDS | LAST
    assert json.loads(answer.responses[-1]["status"][0]) == {"code": "OK"}
    assert answer.details["finish_reasons"] == ["length"]
    assert answer.details["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "cached_tokens": 0}


@pytest.mark.parametrize("entry", ENTRY_POINTS)
@pytest.mark.parametrize("exclude", [None, True, False])
def test_the_prompt_is_repeated_unless_excluded(server: RunningServer, entry: str, exclude: bool | None) -> None:
    inputs = {} if exclude is None else {"exclude_input_in_output": exclude}
    answer = ask(server, entry, sampling_parameters={"max_tokens": 2}, **inputs)

    assert answer.text == (" a b" if exclude else "a b c a b")


@over_entry_points
@pytest.mark.parametrize("flag", FLAGS)
def test_an_output_comes_where_it_is_asked_for(server: RunningServer, entry: str, stream: bool, flag: str) -> None:
    answer = ask(server, entry, stream=stream, sampling_parameters={"max_tokens": 3}, **{flag: True})

    for response in answer.responses:
        assert set(response) - LAST - ENDS == ALWAYS | {FLAGS[flag]}
    total = {
        "finish_reason": ["length"],
        "num_input_tokens": [3],
        "logprobs": ["null"],
    }
    last = answer.responses[-1][FLAGS[flag]]
    if flag == "return_num_output_tokens":
        assert sum(response["num_output_tokens"][0] for response in answer.responses) == 3
    elif flag == "return_cumulative_logprob":
        assert last[0] < 0
    else:
        assert last == total[FLAGS[flag]]
    if stream and flag == "return_finish_reason":
        assert {response["finish_reason"][0] for response in answer.responses[:-1]} <= {"None"}


@pytest.mark.parametrize("entry", ENTRY_POINTS)
def test_chats_and_token_ids_are_prompts(server: RunningServer, entry: str) -> None:
    ids = ask(server, entry, sampling_parameters={"max_tokens": 3}).token_ids
    by_ids = ENTRY_POINTS[entry](server, {}, {}, {"input_ids": ids, "sampling_parameters": {"max_tokens": 2}})
    chat = [{"role": "user", "content": "x y"}]
    by_chat = ENTRY_POINTS[entry](server, {}, {}, {"messages": chat, "sampling_parameters": {"max_tokens": 2}})

    # Neither is repeated.
    assert by_ids.text == " a b"
    assert by_chat.code == "OK"
    assert len(by_chat.token_ids) == 2


@over_entry_points
def test_generation_goes_on_from_output_ids(server: RunningServer, entry: str, stream: bool) -> None:
    sampling = {"max_tokens": 6}
    whole = ask(server, entry, stream=stream, exclude_input_in_output=True, sampling_parameters=sampling)
    rest = ask(
        server,
        entry,
        stream=stream,
        exclude_input_in_output=True,
        sampling_parameters=sampling,
        output_ids=whole.token_ids[:4],
    )

    assert rest.token_ids == whole.token_ids[4:]
    assert whole.text.endswith(rest.text)


@pytest.mark.parametrize("entry", ENTRY_POINTS)
def test_several_choices(server: RunningServer, entry: str) -> None:
    answer = ask(
        server, entry, exclude_input_in_output=True, sampling_parameters={"n": 2, "temperature": 1, "max_tokens": 3}
    )

    # The double turns the words by one for each choice.
    assert answer.responses[0]["text_output"] == [" a b c", " b c a"]
    assert answer.details["token_counts"] == [3, 3]


def test_only_the_outputs_that_a_client_names_are_sent(server: RunningServer) -> None:
    import tritonclient.grpc as grpcclient

    with grpcclient.InferenceServerClient(server.grpc) as client:
        outputs = [grpcclient.InferRequestedOutput(name) for name in ("text_output", "served_version")]
        result = client.infer(server.service.unary, grpc_inputs(text_input="a b"), outputs=outputs)

    assert {output.name for output in result.get_response().outputs} == {"text_output", "served_version"}


def test_requests_of_one_stream_run_side_by_side(server: RunningServer) -> None:
    with GrpcStream(server.grpc) as stream:
        for _ in range(8):
            stream.send(
                server.service.ensemble,
                text_input="a",
                stream=True,
                extensions={"script": {"tokens": 10, "delay_s": 0.05}},
            )
        finals = tokens = 0
        while finals < 8:
            outputs, final = stream.next()
            finals += final
            tokens += len(outputs.get("token_ids", ()))

    assert tokens == 80


def test_a_line_and_a_count_for_every_request(server: RunningServer) -> None:
    identity = "interface-test-7"
    answer = ENTRY_POINTS["http_infer"](server, {"X-Request-Id": identity}, {}, {"text_input": "secret words"})
    log = server.service.request_log
    wait_for(lambda: log.exists() and identity in log.read_text(), 60, "the line")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    (line,) = [line for line in lines if line["id"] == identity]

    assert (line["version"], line["reason"], line["code"]) == (answer.version, answer.reason, "OK")
    assert (line["prompt_tokens"], line["completion_tokens"]) == (2, 16)
    assert line["first_token_s"] is not None
    assert "secret" not in log.read_text()
    wait_for(lambda: "piccard_requests_total" in server.metrics_text(), 60, "the metrics")
    text = server.metrics_text()
    for name in ("piccard_first_token_seconds_bucket", "piccard_inter_token_seconds_count", "piccard_in_flight"):
        assert name in text


def test_the_vllm_outputs_are_all_there(server: RunningServer) -> None:
    answer = ask(server, "grpc_unary", **dict.fromkeys(FLAGS, True))

    assert {spec.name for spec in VLLM_OUTPUTS} <= set(answer.responses[0])
