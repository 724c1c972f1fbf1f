import itertools
import json
import math
from typing import Any, cast

from deepseek_engine.generation import Generation
from deepseek_engine.prompt import Prompt
from deepseek_engine.request import EngineOutput, TokenLogprob
from deepseek_engine.scripted import WordTokenizer
from deepseek_engine.text.tokenizer import Tokenizer
from hypothesis import given
from hypothesis import strategies as st
from piccard_contract.errors import ErrorCode, RequestError
from piccard_contract.request import Attempt, GenerateRequest, RequestExtensions
from piccard_contract.response import Response, response_outputs
from piccard_contract.sampling import SamplingParams

WORDS = WordTokenizer()
CANCELLED = RequestError(ErrorCode.CANCELLED, "cancelled")


def generation(*, direct: bool = True, prompt: str = "one two", **request: Any) -> Generation:
    request.setdefault("text", prompt)
    return Generation(
        GenerateRequest(id="client", **request),
        Prompt(WORDS.encode(prompt), request["text"]),
        cast(Tokenizer, WORDS),
        id="7",
        version=3,
        cancel_token="token",
        direct=direct,
    )


def output(text: str, *, choice: int = 0, count: int = 1, **fields: Any) -> EngineOutput:
    fields.setdefault("token_ids", [len(text)])
    return EngineOutput(
        request_id="7",
        choice=choice,
        text=text,
        num_prompt_tokens=2,
        num_output_tokens=count,
        num_cached_tokens=0,
        **fields,
    )


def test_outputs_become_one_response_that_tells_them_in_order() -> None:
    response = generation().respond([output(" a"), output(" bc", count=2, finish_reason="stop", stop_reason="d")])
    (choice,) = response.choices
    assert (choice.text, choice.token_ids) == (" a bc", [2, 3])
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "d")
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (2, 2)
    assert response.served_version == 3


def test_token_and_reason_are_told_with_the_first_response_only() -> None:
    served = generation()
    first, second = served.respond([output("a")]), served.respond([output("b", count=2)])
    assert (first.cancel_token, first.route_reason) == ("token", "direct")
    assert (second.cancel_token, second.route_reason) == (None, None)
    assert generation(direct=False).respond([]).route_reason is None


def test_the_prompt_comes_before_the_text_of_each_choice() -> None:
    served = generation(repeat_prompt=True, sampling=SamplingParams(n=2))
    response = served.respond([output(" x"), output(" y", choice=1)])
    assert [choice.text for choice in response.choices] == ["one two x", "one two y"]


def test_a_choice_that_has_ended_is_told_as_ended_in_later_responses() -> None:
    served = generation(sampling=SamplingParams(n=2))
    assert not served.respond([output("a", finish_reason="length")]).finished
    later = served.respond([output("b", choice=1, finish_reason="stop")])
    assert later.finished
    assert [choice.finish_reason for choice in later.choices] == ["length", "stop"]
    assert [choice.text for choice in later.choices] == ["", "b"]
    assert later.usage.completion_tokens == 2


def test_log_probabilities_have_the_shape_of_tritons_vllm_backend() -> None:
    served = generation(sampling=SamplingParams(logprobs=1), returns=frozenset({"logprobs", "cumulative_logprob"}))
    position = {5: TokenLogprob(5, -0.5, 1, " a"), 6: TokenLogprob(6, -1.5, 2, " b")}
    response = served.respond([output(" a", logprobs=[position], cumulative_logprob=-0.5)])
    outputs = response_outputs(response, served.request.returns, final=False)
    assert json.loads(outputs["logprobs"][0]) == [
        {
            "5": {"logprob": -0.5, "rank": 1, "decoded_token": " a"},
            "6": {"logprob": -1.5, "rank": 2, "decoded_token": " b"},
        }
    ]
    assert outputs["cumulative_logprob"] == [-0.5]
    assert json.loads(response_outputs(served.respond([]), served.request.returns, final=True)["logprobs"][0]) == []


def test_a_sum_alone_makes_the_engine_compute_and_tells_no_list() -> None:
    served = generation(returns=frozenset({"logprobs", "cumulative_logprob"}))
    assert served.engine_request().params.logprobs == 0
    position = {5: TokenLogprob(5, -0.5, 1, " a")}
    response = served.respond([output(" a", logprobs=[position], cumulative_logprob=-0.5)])
    outputs = response_outputs(response, served.request.returns, final=False)
    assert (outputs["logprobs"], outputs["cumulative_logprob"]) == (["null"], [-0.5])


def test_a_sum_that_is_not_known_yet_is_not_a_number() -> None:
    served = generation(returns=frozenset({"cumulative_logprob"}))
    (value,) = response_outputs(served.respond([]), served.request.returns, final=False)["cumulative_logprob"]
    assert math.isnan(value)


def test_the_sum_of_a_resumed_generation_is_that_of_its_own_tokens() -> None:
    served = generation(output_ids=[8, 9], sampling=SamplingParams(logprobs=0))
    position = {5: TokenLogprob(5, -0.5, 1, " a")}
    first = served.respond([output(" a", count=3, logprobs=[position], cumulative_logprob=-2.0)])
    second = served.respond([output(" a", count=4, logprobs=[position], cumulative_logprob=-2.5)])
    assert [response.choices[0].cumulative_logprob for response in (first, second)] == [-0.5, -1.0]


def test_prompt_log_probabilities_come_in_the_details() -> None:
    position = {5: TokenLogprob(5, -0.5, 1, " a")}
    served = generation(sampling=SamplingParams(prompt_logprobs=0))
    response = served.respond([output("a", prompt_logprobs=[None, position])])
    assert response.prompt_logprobs == [None, {"5": {"logprob": -0.5, "rank": 1, "decoded_token": " a"}}]


def test_the_engine_is_asked_for_what_the_router_says() -> None:
    attempt = Attempt(cancel_token="token", tenant="acme", priority=-3)
    served = generation(output_ids=[4, 5], extensions=RequestExtensions(attempt=attempt))
    request = served.engine_request()
    assert (request.id, request.output_ids, request.priority, request.salt) == ("7", [4, 5], -3, "acme")
    assert served.usage.completion_tokens == 2


def test_a_cancelled_generation_ends_with_reason_abort() -> None:
    served = generation(sampling=SamplingParams(n=2))
    response = served.respond([output("a", finish_reason="stop")], CANCELLED)
    assert [choice.finish_reason for choice in response.choices] == ["stop", "abort"]
    assert response.error is CANCELLED


def test_a_failed_generation_has_no_reason() -> None:
    response = generation().respond([output("a")], RequestError(ErrorCode.INTERNAL, "failed"))
    assert response.choices[0].finish_reason is None


def test_reasoning_that_is_held_back_is_not_told_with_a_failure() -> None:
    """Another version that goes on tells it."""
    served = generation(prompt="ask <think>", extensions=RequestExtensions(separate_reasoning=True))
    failed = output("", count=2, token_ids=[], finish_reason="error")
    (choice,) = served.respond([output("so </thi"), failed], RequestError(ErrorCode.INTERNAL, "failed")).choices
    assert (choice.reasoning, choice.text) == ("so ", "")


def test_a_prompt_that_opens_the_reasoning_makes_the_text_reasoning() -> None:
    apart = RequestExtensions(separate_reasoning=True)
    for given_as in ({"text": "ask <think>"}, {"text": None, "input_ids": WORDS.encode("ask <think>")}):
        served = generation(prompt="ask <think>", extensions=apart, **given_as)
        (choice,) = served.respond([output("so</think>yes", finish_reason="stop")]).choices
        assert (choice.reasoning, choice.text) == ("so", "yes")


@given(st.lists(st.integers(1, 30)), st.integers(0, 60))
def test_reasoning_is_told_apart_however_it_is_cut_and_wherever_it_is_resumed(cuts: list[int], resume: int) -> None:
    ids = WORDS.encode("<think>\nlet me see\n</think>\n\nthe answer is <b>")
    apart = RequestExtensions(separate_reasoning=True)
    resumed = ids[: resume % len(ids)]
    told = Response()
    head = generation(extensions=apart)
    if resumed:
        told.extend(head.respond([output(WORDS.decode(resumed), count=len(resumed))]))
    served = generation(extensions=apart, output_ids=resumed)
    rest = ids[len(resumed) :]
    positions = sorted({cut for cut in cuts if cut < len(rest)} | {0, len(rest)})
    for start, stop in itertools.pairwise(positions):
        end = "stop" if stop == len(rest) else None
        told.extend(served.respond([output(WORDS.decode(rest[start:stop]), count=stop, finish_reason=end)]))
    (choice,) = told.choices
    assert (choice.reasoning, choice.text) == ("let me see", "the answer is <b>")
