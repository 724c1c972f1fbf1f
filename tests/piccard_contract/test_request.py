"""A request is read, refused with the right code, and written back the same."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from piccard_contract.errors import ErrorCode, RequestError
from piccard_contract.request import (
    MAX_REQUEST_BYTES,
    Attempt,
    GatewayClaims,
    GenerateRequest,
    RequestExtensions,
    parse_request,
    request_inputs,
)
from piccard_contract.routing import RouteKeys
from piccard_contract.sampling import SamplingParams
from piccard_contract.unserved import UNSERVED

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
token_ids = st.lists(st.integers(0, 2**40), max_size=5)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
returns = st.frozensets(
    st.sampled_from(["finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens"])
)


@st.composite
def samplings(draw: st.DrawFn) -> SamplingParams:
    low = draw(st.integers(0, 5))
    return SamplingParams(
        n=draw(st.integers(1, 3)),
        temperature=draw(st.floats(0.1, 2)),
        top_p=draw(st.floats(0.01, 1)),
        top_k=draw(st.integers(-1, 50)),
        seed=draw(st.none() | st.integers(-(2**63), 2**63 - 1)),
        stop=draw(st.lists(texts.filter(bool), max_size=3)),
        stop_token_ids=draw(token_ids),
        max_tokens=draw(st.none() | st.integers(max(low, 1), 9)),
        min_tokens=low,
        logprobs=draw(st.none() | st.integers(0, 20)),
        logit_bias=draw(st.dictionaries(st.integers(0, 99), st.floats(-100, 100), max_size=2)),
        ignore_eos=draw(st.booleans()),
    )


@st.composite
def requests(draw: st.DrawFn) -> GenerateRequest:
    prompt = draw(
        st.one_of(
            st.fixed_dictionaries({"text": texts.filter(bool)}),
            st.fixed_dictionaries({"messages": st.lists(st.dictionaries(texts, json_values), min_size=1, max_size=2)}),
            st.fixed_dictionaries({"input_ids": token_ids.filter(bool)}),
        )
    )
    stream = draw(st.booleans())
    return GenerateRequest(
        id="me",
        **prompt,
        output_ids=draw(token_ids),
        stream=stream,
        repeat_prompt="text" in prompt and not stream and draw(st.booleans()),
        returns=draw(returns),
        sampling=draw(samplings()),
        extensions=RequestExtensions(
            announce=draw(st.booleans()),
            coalesce_ms=draw(st.integers(0, 10_000)),
            chat_template_kwargs=draw(st.dictionaries(texts, json_values, max_size=2)),
            script=draw(st.none() | st.dictionaries(texts, json_values, max_size=2)),
            gateway=draw(st.none() | st.builds(GatewayClaims, tenant=texts, priority=st.integers(-100, 100))),
            attempt=draw(st.none() | st.builds(Attempt, cancel_token=texts)),
        ),
    )


def parse(parameters: dict[str, Any] | None = None, /, **inputs: Any) -> GenerateRequest:
    """Read a request as admission does with the default policy; a single value is a tensor of one element."""
    tensors = {name: value if isinstance(value, list) else [value] for name, value in inputs.items()}
    return parse_request(tensors, parameters or {}, request_id="made", sticky_keys=["X-Session-Id", "user"])


@given(requests())
def test_inputs_round_trip(request: GenerateRequest) -> None:
    assert parse_request(request_inputs(request), {}, request_id="me") == request


@given(requests())
def test_inputs_round_trip_as_bytes(request: GenerateRequest) -> None:
    as_sent = {
        name: [value.encode() if isinstance(value, str) else value for value in values]
        for name, values in request_inputs(request).items()
    }

    assert parse_request(as_sent, {}, request_id="me") == request


@given(requests())
def test_admitted_json_round_trip(request: GenerateRequest) -> None:
    admitted = request.model_dump_json(exclude_defaults=True)

    assert GenerateRequest.model_validate_json(admitted) == request


deep = "[" * 300 + "]" * 300


@pytest.mark.parametrize(
    ("code", "parameters", "inputs"),
    [
        (ErrorCode.MISSING_INPUT, {}, {}),
        (ErrorCode.MISSING_INPUT, {}, {"text_input": b""}),
        (ErrorCode.MISSING_INPUT, {}, {"text_input": []}),
        (ErrorCode.MISSING_INPUT, {}, {"messages": b""}),
        (ErrorCode.MISSING_INPUT, {}, {"messages": b"[]"}),
        (ErrorCode.MISSING_INPUT, {}, {"input_ids": []}),
        (ErrorCode.CONFLICTING_INPUTS, {}, {"text_input": b"a", "messages": b'[{"role": "user"}]'}),
        (ErrorCode.CONFLICTING_INPUTS, {}, {"text_input": b"a", "input_ids": [1]}),
        (ErrorCode.CONFLICTING_INPUTS, {}, {"text_input": b"a", "messages": b"[{}]", "input_ids": [1]}),
        (ErrorCode.INVALID_JSON, {}, {"messages": b"[{"}),
        (ErrorCode.INVALID_JSON, {}, {"messages": b'{"role": "user"}'}),
        (ErrorCode.INVALID_JSON, {}, {"messages": b'["hello"]'}),
        (ErrorCode.INVALID_JSON, {}, {"messages": f'[{{"role": {deep}}}]'.encode()}),
        (ErrorCode.INVALID_JSON, {}, {"messages": b"[" * 100_000}),
        (ErrorCode.INVALID_JSON, {}, {"text_input": b"a", "sampling_parameters": b"{temperature: 1}"}),
        (ErrorCode.INVALID_JSON, {}, {"text_input": b"a", "sampling_parameters": b"[1]"}),
        (ErrorCode.INVALID_JSON, {}, {"text_input": b"a", "sampling_parameters": b'{"top_p": NaN}'}),
        (ErrorCode.INVALID_JSON, {}, {"text_input": b"a", "sampling_parameters": b'{"logit_bias": {"1": NaN}}'}),
        (ErrorCode.INVALID_JSON, {}, {"text_input": b"a", "extensions": b"nope"}),
        (ErrorCode.INVALID_JSON, {}, {"text_input": b"a", "extensions": b"[]"}),
        (ErrorCode.INVALID_ENCODING, {}, {"text_input": b"\xff\xfe"}),
        (ErrorCode.INVALID_ENCODING, {}, {"text_input": "half \ud800 pair"}),
        (ErrorCode.INVALID_ENCODING, {}, {"messages": b'[{"content": "\\ud800"}]'}),
        (ErrorCode.UNKNOWN_PARAMETER, {}, {"text_input": b"a", "sampling_parameters": b'{"temprature": 1}'}),
        (ErrorCode.UNKNOWN_PARAMETER, {"temprature": 1.0}, {"text_input": b"a"}),
        (ErrorCode.UNKNOWN_PARAMETER, {}, {"text_input": b"a", "extensions": b'{"anounce": true}'}),
        (ErrorCode.INVALID_VALUE, {}, {"text_input": b"a", "sampling_parameters": b'{"temperature": -1}'}),
        (ErrorCode.INVALID_VALUE, {}, {"text_input": b"a", "sampling_parameters": b'{"temperature": "warm"}'}),
        (ErrorCode.INVALID_VALUE, {}, {"text_input": b"a", "sampling_parameters": b'{"max_tokens": true}'}),
        (ErrorCode.INVALID_VALUE, {"max_tokens": 5}, {"text_input": b"a", "sampling_parameters": b'{"max_tokens": 4}'}),
        (ErrorCode.INVALID_VALUE, {"max_tokens": 0}, {"text_input": b"a"}),
        (ErrorCode.INVALID_VALUE, {"version": "two"}, {"text_input": b"a"}),
        (ErrorCode.INVALID_VALUE, {"version": 0}, {"text_input": b"a"}),
        (ErrorCode.INVALID_VALUE, {"version": -1}, {"text_input": b"a"}),
        (ErrorCode.INVALID_VALUE, {"version": True}, {"text_input": b"a"}),
        (ErrorCode.INVALID_VALUE, {"version": 1.5}, {"text_input": b"a"}),
        (ErrorCode.INVALID_VALUE, {"version": "9" * 5000}, {"text_input": b"a"}),
        (ErrorCode.INVALID_VALUE, {}, {"text_input": [b"a", b"b"]}),
        (ErrorCode.INVALID_VALUE, {}, {"text_input": b"a", "stream": [True, False]}),
        (ErrorCode.INVALID_VALUE, {}, {"text_input": b"a", "stream": True, "exclude_input_in_output": False}),
        (ErrorCode.INVALID_VALUE, {}, {"input_ids": [1], "exclude_input_in_output": False}),
        (ErrorCode.INVALID_VALUE, {}, {"text_input": b"a", "extensions": b'{"coalesce_ms": -1}'}),
        (ErrorCode.INVALID_VALUE, {}, {"text_input": b"a", "extensions": b'{"gateway": {"priority": 1000}}'}),
        (ErrorCode.INVALID_VALUE, {}, {"text_input": b"a", "extensions": b'{"chat_template_kwargs": {"messages": 1}}'}),
        (
            ErrorCode.INVALID_VALUE,
            {},
            {"text_input": b"a", "extensions": b'{"chat_template_kwargs": {"add_generation_prompt": true}}'},
        ),
        (ErrorCode.INVALID_VALUE, {"x-request-id": "r" * 257}, {"text_input": b"a"}),
        (ErrorCode.INVALID_TOKEN, {}, {"input_ids": [1, -1]}),
        (ErrorCode.INVALID_TOKEN, {}, {"text_input": b"a", "output_ids": [-5]}),
        (ErrorCode.REQUEST_TOO_LARGE, {}, {"text_input": b"a" * (MAX_REQUEST_BYTES + 1)}),
        (ErrorCode.REQUEST_TOO_LARGE, {}, {"input_ids": [1] * (MAX_REQUEST_BYTES // 8 + 1)}),
        (ErrorCode.UNSUPPORTED, {}, {"text_input": b"a", "image": b"\x89PNG"}),
        (ErrorCode.UNSUPPORTED, {}, {"embedding_request": b"{}"}),
        (ErrorCode.UNSUPPORTED, {"lora_name": "x"}, {"text_input": b"a"}),
    ],
)
def test_refusals(code: ErrorCode, parameters: dict[str, Any], inputs: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refusal:
        parse(parameters, **inputs)

    assert refusal.value.code is code
    assert len(refusal.value.message) > 10


def test_refusal_names_the_nearest_parameter() -> None:
    with pytest.raises(RequestError, match="Did you mean 'temperature'"):
        parse({"temprature": 1}, text_input=b"a")


@pytest.mark.parametrize(
    ("parameters", "route"),
    [
        ({"X-Canary": "true"}, RouteKeys(canary="true")),
        ({"x-canary": "ALWAYS"}, RouteKeys(canary="ALWAYS")),
        ({"X-CANARY": True}, RouteKeys(canary="true")),
        ({"x-session-id": "7"}, RouteKeys(sticky="x-session-id:7")),
        ({"X-Session-Id": "7", "user": "bo"}, RouteKeys(sticky="x-session-id:7")),
        ({"user": "bo"}, RouteKeys(sticky="user:bo")),
        ({"X-User": "bo"}, RouteKeys(sticky="user:bo")),
        ({"x-session-id": "", "user": "bo"}, RouteKeys(sticky="user:bo")),
        ({"version": 3}, RouteKeys(version=3)),
        ({"VERSION": "3"}, RouteKeys(version=3)),
        ({"version": ""}, RouteKeys()),
    ],
    ids=str,
)
def test_route_keys_fold_case(parameters: dict[str, Any], route: RouteKeys) -> None:
    assert parse(parameters, text_input=b"a").route == route


def test_headers_of_a_policy_are_no_parameters() -> None:
    request = parse_request(
        {"text_input": ["a"]},
        {"X-Lane": "true", "x-team": "red", "X-Canary": "true"},
        request_id="made",
        canary_header="X-Lane",
        sticky_keys=["X-Team"],
    )

    assert request.route == RouteKeys(canary="true", sticky="x-team:red")


@pytest.mark.parametrize(
    ("parameters", "identity"),
    [
        ({}, "made"),
        ({"X-Request-Id": "mine"}, "mine"),
        ({"x-request-id": ""}, "made"),
        ({"id": "of the body"}, "of the body"),
        ({"id": "of the body", "x-request-id": "mine"}, "mine"),
    ],
)
def test_request_id(parameters: dict[str, Any], identity: str) -> None:
    assert parse(parameters, text_input=b"a").id == identity


@pytest.mark.parametrize(
    ("inputs", "repeated"),
    [
        ({"text_input": "a"}, True),
        ({"text_input": "a", "exclude_input_in_output": True}, False),
        ({"text_input": "a", "exclude_input_in_output": False}, True),
        ({"text_input": "a", "stream": True}, False),
        ({"text_input": "a", "stream": True, "exclude_input_in_output": True}, False),
        ({"input_ids": [1, 2]}, False),
        ({"messages": '[{"role": "user", "content": "a"}]'}, False),
    ],
    ids=str,
)
def test_prompt_is_repeated_as_by_the_vllm_backend(inputs: dict[str, Any], repeated: bool) -> None:
    assert parse(**inputs).repeat_prompt is repeated


@pytest.mark.parametrize("name", ["timeout", "priority", "sequence_id", "binary_data_output", "traceparent"])
def test_what_triton_and_its_clients_set_passes(name: str) -> None:
    assert parse({name: 1}, text_input=b"a").sampling == SamplingParams()


def test_parameters_are_sampling_parameters() -> None:
    sampling = parse({"max_tokens": "7", "Temperature": 0.5, "stop": "END"}, text_input=b"a").sampling

    assert sampling == SamplingParams(max_tokens=7, temperature=0.5, stop=["END"])


def test_null_is_left_out() -> None:
    sampling = {"temperature": None, "max_tokens": None, "stop": None, "logit_bias": None}

    assert parse(text_input=b"a", sampling_parameters=json.dumps(sampling)).sampling == SamplingParams(max_tokens=None)


def test_cancel_needs_no_prompt() -> None:
    request = parse(extensions=b'{"cancel": "2.abc"}')

    assert request.extensions.cancel == "2.abc"
    assert request.text is None


@given(texts, st.integers(-100, 100), st.binary(min_size=1, max_size=40))
def test_claims_are_signed(tenant: str, priority: int, secret: bytes) -> None:
    claims = GatewayClaims(tenant=tenant, priority=priority)

    assert not claims.signed_by(secret)
    assert claims.sign(secret).signed_by(secret)
    assert not claims.sign(secret).signed_by(secret + b"x")
    assert not claims.sign(secret).model_copy(update={"priority": priority + 1}).signed_by(secret)


@pytest.mark.parametrize("name", UNSERVED)
def test_what_vllm_has_and_we_do_not_is_no_unknown_parameter(name: str) -> None:
    for parameters, inputs in (({name: "2"}, {}), ({}, {"sampling_parameters": json.dumps({name: [1]}).encode()})):
        with pytest.raises(RequestError) as refusal:
            parse(parameters, text_input=b"a", **inputs)
        assert refusal.value.code is ErrorCode.UNSUPPORTED
        assert refusal.value.message == f"{name} is not served: {UNSERVED[name]}; leave it out"
    assert name not in SamplingParams.model_fields
    # As other parameters: null is one that was left out.
    assert parse(text_input=b"a", sampling_parameters=json.dumps({name: None}).encode()).sampling == SamplingParams()
