"""A response is written as tensors and read back; responses add up whichever way they are merged."""

import copy
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from piccard_contract.errors import ErrorCode, RequestError
from piccard_contract.response import Choice, Response, Usage, parse_response, response_outputs
from piccard_contract.tensors import DATATYPES, OUTPUT_SPECS

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
ALL = frozenset({"finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens"})
entries = st.fixed_dictionaries({"7": st.fixed_dictionaries({"logprob": st.floats(-9, 0), "rank": st.integers(1, 9)})})


def choices(count: int, *, with_logprobs: bool) -> st.SearchStrategy[list[Choice]]:
    one = st.builds(
        Choice,
        text=texts,
        token_ids=st.lists(st.integers(0, 2**40), max_size=4),
        finish_reason=st.sampled_from([None, "stop", "length", "abort"]),
        cumulative_logprob=st.floats(-100, 0, width=32),
        logprobs=st.lists(entries, max_size=2) if with_logprobs else st.none(),
        reasoning=texts,
        stop_reason=st.none() | st.integers(0, 9) | texts,
    )
    return st.lists(one, min_size=count, max_size=count)


@st.composite
def responses(draw: st.DrawFn, count: int | None = None, with_logprobs: bool | None = None) -> Response:
    flag = draw(st.booleans()) if with_logprobs is None else with_logprobs
    return Response(
        choices=draw(choices(draw(st.integers(1, 3)) if count is None else count, with_logprobs=flag)),
        usage=draw(st.builds(Usage, *([st.integers(0, 2**31)] * 3))),
        served_version=draw(st.none() | st.integers(1, 9)),
        route_reason=draw(st.none() | st.sampled_from(["pin", "ratio"])),
        cancel_token=draw(st.none() | st.just("1.abc")),
        prompt_logprobs=draw(st.none() | st.lists(st.none() | entries, min_size=1, max_size=2)),
        details=draw(st.dictionaries(st.sampled_from(["route", "cancelled"]), st.booleans())),
    )


@given(responses())
def test_outputs_round_trip(response: Response) -> None:
    assert parse_response(response_outputs(response, ALL, final=True)) == response


@given(responses())
def test_outputs_round_trip_as_bytes(response: Response) -> None:
    outputs = {
        name: [value.encode() if isinstance(value, str) else value for value in values]
        for name, values in response_outputs(response, ALL, final=True).items()
    }

    assert parse_response(outputs) == response


@given(responses(), st.frozensets(st.sampled_from(sorted(ALL))), st.booleans())
def test_outputs_fit_their_tensors(response: Response, returns: frozenset[str], final: bool) -> None:
    outputs = response_outputs(response, returns, final=final)

    assert {name for name in ALL if name in outputs} == returns
    for name, values in outputs.items():
        spec = OUTPUT_SPECS[name]
        assert spec.datatype in DATATYPES
        assert spec.dims == (-1,) or len(values) == spec.dims[0], name


@st.composite
def triples(draw: st.DrawFn) -> list[Response]:
    count, flag = draw(st.integers(1, 2)), draw(st.booleans())
    return [draw(responses(count, flag)) for _ in range(3)]


@settings(max_examples=30)
@given(triples())
def test_extend_is_associative(parts: list[Response]) -> None:
    first, second, third = parts
    left, right, tail = copy.deepcopy(first), copy.deepcopy(first), copy.deepcopy(second)
    left.extend(copy.deepcopy(second))
    left.extend(copy.deepcopy(third))
    tail.extend(copy.deepcopy(third))
    right.extend(tail)

    assert left == right


@settings(max_examples=30)
@given(triples())
def test_extend_keeps_every_token(parts: list[Response]) -> None:
    whole = copy.deepcopy(parts[0])
    for part in parts[1:]:
        whole.extend(copy.deepcopy(part))

    for index, choice in enumerate(whole.choices):
        assert choice.text == "".join(part.choices[index].text for part in parts)
        assert choice.token_ids == [token for part in parts for token in part.choices[index].token_ids]


def test_extend_needs_the_same_choices() -> None:
    with pytest.raises(ValueError, match="zip"):
        Response([Choice()]).extend(Response([Choice(), Choice()]))


@pytest.mark.parametrize("final", [True, False])
def test_status_tells_the_error(final: bool) -> None:
    error = RequestError(ErrorCode.OUT_OF_MEMORY, "no blocks", retry_after=2.0)
    outputs = response_outputs(Response(error=error), frozenset(), final=final)
    read = parse_response(outputs).error

    assert read is not None
    assert (read.code, read.message, read.retry_after) == (ErrorCode.OUT_OF_MEMORY, "no blocks", 2.0)


def test_only_the_last_response_has_status_and_usage() -> None:
    response = Response([Choice("a", [1])], Usage(3, 1, 0))
    middle, last = (response_outputs(response, frozenset(), final=final) for final in (False, True))

    assert "status" not in middle
    assert "details" not in middle
    assert json.loads(last["status"][0]) == {"code": "OK"}
    assert json.loads(last["details"][0])["usage"]["prompt_tokens"] == 3


def test_prompt_tokens_are_read_before_the_last_response() -> None:
    outputs = response_outputs(Response(usage=Usage(5, 1)), frozenset({"num_input_tokens"}), final=False)

    assert parse_response(outputs).usage.prompt_tokens == 5


def test_an_unknown_sum_is_nan() -> None:
    outputs = response_outputs(Response(), frozenset({"cumulative_logprob"}), final=False)

    assert math.isnan(outputs["cumulative_logprob"][0])


@pytest.mark.parametrize(
    "outputs",
    [{"text_output": ["a"], "status": ["{}x"]}, {"text_output": ["a"], "details": ["[1"]}],
    ids=["a status that is no JSON", "details that are no JSON"],
)
def test_what_is_no_response(outputs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_response(outputs)
