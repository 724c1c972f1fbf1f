"""Requests that are made to cost: each is refused for a sentence's work, with its code."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from piccard_contract.errors import ErrorCode, RequestError
from piccard_contract.request import (
    MAX_CHAT_VALUES,
    MAX_JSON_VALUES,
    MAX_REQUEST_BYTES,
    GenerateRequest,
    check_tensor_bytes,
    parse_request,
)
from piccard_contract.sampling import MAX_STOP_LENGTH, MAX_TOKEN_ENTRIES

MILLION = 10**6


def parse(parameters: dict[str, Any] | None = None, **inputs: Any) -> GenerateRequest:
    inputs.setdefault("text_input", "a")
    return parse_request(
        {name: value if isinstance(value, list) else [value] for name, value in inputs.items()},
        parameters or {},
        request_id="a",
    )


def chat(*contents: Any) -> str:
    return json.dumps([{"role": "user", "content": content} for content in contents])


COSTLY: dict[str, tuple[ErrorCode, dict[str, Any]]] = {
    "stop strings": (ErrorCode.INVALID_VALUE, {"sampling_parameters": json.dumps({"stop": ["x"] * 9999})}),
    "very many stop strings": (
        ErrorCode.REQUEST_TOO_LARGE,
        {"sampling_parameters": json.dumps({"stop": ["x"] * 99999})},
    ),
    "a long stop string": (ErrorCode.INVALID_VALUE, {"sampling_parameters": json.dumps({"stop": ["x" * MILLION]})}),
    "stop token ids": (ErrorCode.INVALID_VALUE, {"sampling_parameters": json.dumps({"stop_token_ids": [1] * 9999})}),
    "logit bias": (
        ErrorCode.INVALID_VALUE,
        {"sampling_parameters": json.dumps({"logit_bias": {str(i): 1 for i in range(9999)}})},
    ),
    "bad logit bias": (
        ErrorCode.INVALID_VALUE,
        {"sampling_parameters": json.dumps({"logit_bias": {f"x{i}": "y" for i in range(9999)}})},
    ),
    "unknown keys": (
        ErrorCode.UNKNOWN_PARAMETER,
        {"sampling_parameters": json.dumps({f"x{i}": 1 for i in range(9999)})},
    ),
    "very many unknown keys": (
        ErrorCode.REQUEST_TOO_LARGE,
        {"sampling_parameters": json.dumps({f"x{i}": 1 for i in range(99999)})},
    ),
    "unknown extensions": (
        ErrorCode.REQUEST_TOO_LARGE,
        {"extensions": json.dumps({"gateway": {f"x{i}": 1 for i in range(99999)}})},
    ),
    "a long name": (ErrorCode.UNKNOWN_PARAMETER, {"sampling_parameters": json.dumps({"x" * MILLION: 1})}),
    "unknown parameters": (ErrorCode.UNKNOWN_PARAMETER, {"parameters": {f"x{i}": 1 for i in range(99999)}}),
    "parameters of much text": (ErrorCode.REQUEST_TOO_LARGE, {"parameters": {"x-user": "x" * (MAX_REQUEST_BYTES + 1)}}),
    "empty lists": (ErrorCode.REQUEST_TOO_LARGE, {"text_input": "", "messages": f"[{','.join(['[]'] * MILLION)}]"}),
    "empty objects": (ErrorCode.REQUEST_TOO_LARGE, {"text_input": "", "messages": f"[{','.join(['{}'] * MILLION)}]"}),
    "a list within a chat": (ErrorCode.REQUEST_TOO_LARGE, {"text_input": "", "messages": chat([0] * MILLION)}),
    "nested lists": (ErrorCode.REQUEST_TOO_LARGE, {"sampling_parameters": "[" * MILLION}),
    "less nested lists": (ErrorCode.INVALID_JSON, {"sampling_parameters": "[" * 9999}),
    "nested objects": (ErrorCode.INVALID_JSON, {"extensions": '{"a":' * 9999 + "1" + "}" * 9999}),
    "a text that never ends": (ErrorCode.REQUEST_TOO_LARGE, {"sampling_parameters": '"' + "\\\\," * MILLION}),
    "a number of many digits": (ErrorCode.INVALID_JSON, {"sampling_parameters": f'{{"seed": {"9" * 5000}}}'}),
    "a number that is too large": (ErrorCode.INVALID_VALUE, {"sampling_parameters": '{"temperature": 1e999}'}),
    "a number that is none": (ErrorCode.INVALID_JSON, {"sampling_parameters": '{"temperature": NaN}'}),
    "infinity": (ErrorCode.INVALID_JSON, {"sampling_parameters": '{"temperature": -Infinity}'}),
    "half a character": (ErrorCode.INVALID_ENCODING, {"text_input": "", "messages": chat("x").replace("x", "\\udc00")}),
    "no UTF-8": (ErrorCode.INVALID_ENCODING, {"text_input": b"\xff"}),
    "a NUL in a number": (ErrorCode.INVALID_JSON, {"sampling_parameters": '{"seed": 1\0}'}),
}


@pytest.mark.parametrize("case", COSTLY)
def test_what_is_made_to_cost_is_refused(case: str) -> None:
    code, inputs = COSTLY[case]
    with pytest.raises(RequestError) as refused:
        parse(**inputs)
    assert refused.value.code is code, refused.value
    # Nothing of what was sent comes back at length.
    assert 15 < len(refused.value.message) < 700


def test_much_is_taken_that_is_no_cost() -> None:
    text = "a, [b], {c}" * 100_000
    assert parse(text_input=text).text == text
    messages = [{"role": "user", "content": text}]
    assert parse(text_input="", messages=json.dumps(messages)).messages == messages
    turns = [{"role": "user", "content": "x"}] * (MAX_CHAT_VALUES // 4)
    assert len(parse(text_input="", messages=json.dumps(turns)).messages or []) == len(turns)
    bias = {str(token): 1.0 for token in range(MAX_TOKEN_ENTRIES)}
    stop = ["x" * MAX_STOP_LENGTH] * 16
    sampling = parse(sampling_parameters=json.dumps({"logit_bias": bias, "stop": stop})).sampling
    assert len(sampling.logit_bias) == MAX_TOKEN_ENTRIES
    assert sampling.stop == stop


def test_the_last_of_two_keys_counts() -> None:
    assert parse(sampling_parameters='{"max_tokens": 1, "max_tokens": 2}').sampling.max_tokens == 2


def test_a_nul_is_a_character() -> None:
    assert parse(text_input="a\0b").text == "a\0b"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)


@given(value=json_values, most=st.integers(0, 30))
def test_values_are_counted_without_reading_them(value: Any, most: int) -> None:
    """A JSON text is refused for its number of values only where it may have more than that."""
    inputs = {"text_input": "", "messages": chat(value)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("piccard_contract.request.MAX_CHAT_VALUES", most)
        try:
            parse(**inputs)
        except RequestError as error:
            if error.code is ErrorCode.REQUEST_TOO_LARGE:
                assert _count(json.loads(chat(value))) > most


def _count(value: Any) -> int:
    """Values, keys and containers of a value."""
    if isinstance(value, dict):
        return 1 + sum(1 + _count(item) for item in value.values())
    return 1 + sum(map(_count, value)) if isinstance(value, list) else 1


def test_large_tensors_are_refused_by_their_size() -> None:
    check_tensor_bytes({"input_ids": MAX_REQUEST_BYTES})
    with pytest.raises(RequestError, match="REQUEST_TOO_LARGE"):
        check_tensor_bytes({"input_ids": MAX_REQUEST_BYTES, "output_ids": 8})


def test_json_values_have_a_limit() -> None:
    assert MAX_JSON_VALUES > 2 * MAX_TOKEN_ENTRIES
