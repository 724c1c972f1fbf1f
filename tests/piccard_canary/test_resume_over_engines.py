"""Router and engines together, without a server: wherever a version breaks, the client gets the unbroken answer."""

from collections.abc import Callable
from typing import Any

import pytest
from canary_fakes import Client, Play, Scene
from deepseek_engine.version import OpenVersion
from engine_versions import Break, Ending, EngineVersions, scripted_version, toy_version, whole_answer
from hypothesis import given, settings
from hypothesis import strategies as st
from piccard_contract.errors import ErrorCode
from piccard_contract.request import GenerateRequest, RequestExtensions
from piccard_contract.response import Response
from piccard_contract.routing import RouteKeys
from piccard_contract.sampling import SamplingParams

TO_CANARY = RouteKeys(canary="true")
ALL_RETURNS = frozenset(
    {"finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens"},
)
ENDINGS: st.SearchStrategy[Ending] = st.sampled_from(["error", "raise", "silence"])
CHUNKS = st.lists(st.integers(1, 5), max_size=6)

# Characters of one to four bytes; the white space cuts words, and words of more than seven bytes are cut anywhere.
TEXTS = st.text(st.sampled_from("ab\u00e9\u20ac\U0001f600 "), min_size=1, max_size=40)


@st.composite
def scripted_requests(draw: st.DrawFn) -> GenerateRequest:
    """A request for a scripted version, with stop strings that may be cut by tokens and by the seam."""
    text = draw(TEXTS)
    told = " " + " ".join(text.split() or ["word"])
    tokens = draw(st.integers(1, 12))
    starts = draw(st.lists(st.tuples(st.integers(0, len(told) - 1), st.integers(1, 5)), max_size=2))
    sampling = SamplingParams(
        temperature=0,
        max_tokens=draw(st.integers(1, 12)),
        min_tokens=draw(st.sampled_from([0, 0, 1])),
        stop=[*(told[start : start + length] for start, length in starts), *draw(st.sampled_from([[], ["never"]]))],
        include_stop_str_in_output=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, 0, 2])),
        prompt_logprobs=draw(st.sampled_from([None, 1])),
    )
    opening = draw(st.sampled_from(["", "<think> ", "<think> a </think> "]))
    extensions = RequestExtensions(
        script={"tokens": tokens, "delay_s": 0.0, "text": opening + text},
        separate_reasoning=draw(st.booleans()),
        announce=draw(st.booleans()),
    )
    return asked(draw, sampling, extensions, {"text": draw(st.sampled_from(["ask", "why \u20ac"]))})


@st.composite
def toy_requests(draw: st.DrawFn) -> GenerateRequest:
    """A request for the toy model: seeds, filters, penalties and log-probabilities."""
    few = draw(st.sampled_from([{}, dict.fromkeys([*"ab\u20ac\U0001f600".encode()], 30.0)]))
    sampling = SamplingParams(
        max_tokens=draw(st.integers(1, 12)),
        ignore_eos=draw(st.booleans()),
        logit_bias=few,
        stop=draw(st.sampled_from([[], ["ab", "ba"], ["\ufffd"]])),
        seed=draw(st.sampled_from([None, 3, 2**40])),
        temperature=draw(st.sampled_from([0.0, 1.0])),
        top_p=draw(st.sampled_from([1.0, 0.8])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.7])),
        logprobs=draw(st.sampled_from([None, 2])),
    )
    return asked(draw, sampling, RequestExtensions(), {"input_ids": list(range(60, 90))})


def asked(
    draw: st.DrawFn, sampling: SamplingParams, extensions: RequestExtensions, prompt: dict[str, Any]
) -> GenerateRequest:
    returns = frozenset(draw(st.sets(st.sampled_from(sorted(ALL_RETURNS)))))
    return GenerateRequest(
        id="r",
        stream=draw(st.booleans()),
        returns=returns,
        sampling=sampling,
        extensions=extensions,
        route=TO_CANARY,
        **prompt,
    )


def served(
    make: Callable[[int], OpenVersion],
    request: GenerateRequest,
    chunks: list[int],
    *,
    endless: frozenset[int] = frozenset(),
    **breaks: Break,
) -> tuple[Client, EngineVersions]:
    """What a client gets of versions 1 (stable) and 2 (canary); `breaks` are of v1 and v2."""
    versions = EngineVersions(make, {int(name[1:]): at for name, at in breaks.items()}, endless, chunks)
    scene = Scene({1: Play(), 2: Play()}, streams=request.stream, fallback_policy="both")
    object.__setattr__(scene.around, "client", versions)
    client = Client()
    scene.router.answer(request.model_dump_json(), client)
    assert client.finals == 1
    assert scene.router.streams() == []
    assert scene.logged == [] or any(at.how == "raise" for at in breaks.values()), scene.logged
    return client, versions


def merged(client: Client) -> Response:
    """Everything that a client was sent, as one response."""
    answer = client.responses[0]
    for response in client.responses[1:]:
        answer.extend(response)
    return answer


def seeded(request: GenerateRequest, versions: EngineVersions) -> GenerateRequest:
    """The request with the seed that the router drew."""
    return request.model_copy(update={"sampling": versions.calls[0][1].sampling})


def check_same(answer: Response, whole: Response, request: GenerateRequest) -> None:
    (got,), (wanted,) = answer.choices, whole.choices
    assert got.text == wanted.text
    assert got.reasoning == wanted.reasoning
    assert got.token_ids == wanted.token_ids
    assert (got.finish_reason, got.stop_reason) == (wanted.finish_reason, wanted.stop_reason)
    assert answer.usage.prompt_tokens == whole.usage.prompt_tokens
    assert answer.usage.completion_tokens == whole.usage.completion_tokens
    assert answer.prompt_logprobs == whole.prompt_logprobs
    if "logprobs" in request.returns:
        assert got.logprobs == wanted.logprobs
    if "cumulative_logprob" in request.returns:
        sums = whole_sum(request, wanted.cumulative_logprob)
        assert got.cumulative_logprob == pytest.approx(sums, abs=1e-3)


def whole_sum(request: GenerateRequest, known: float | None) -> float:
    assert known is not None, request
    return known


def check_part(client: Client, whole: Response) -> None:
    """An answer that was cut off is the beginning of the whole one."""
    if not client.responses:
        return
    (got,), (wanted,) = merged(client).choices, whole.choices
    assert wanted.text.startswith(got.text)
    assert wanted.reasoning.startswith(got.reasoning)
    assert wanted.token_ids[: len(got.token_ids)] == got.token_ids


def check_resumed(
    make: Callable[[int], OpenVersion], request: GenerateRequest, after: int, how: Ending, chunks: list[int]
) -> None:
    client, versions = served(make, request, chunks, v2=Break(after, how))
    whole = whole_answer(make(1), seeded(request, versions))

    assert client.error is None
    check_same(merged(client), whole, request)
    ends = after >= len(whole.choices[0].token_ids)
    assert client.responses[-1].served_version == (2 if ends else 1)
    assert [version for version, _ in versions.calls] == ([2] if ends else [2, 1])


@settings(deadline=None, max_examples=150)
@given(scripted_requests(), st.integers(0, 11), ENDINGS, CHUNKS)
def test_a_text_is_the_unbroken_one(request: GenerateRequest, after: int, how: Ending, chunks: list[int]) -> None:
    check_resumed(scripted_version, request, after, how, chunks)


@settings(deadline=None, max_examples=25)
@given(toy_requests(), st.integers(0, 11), ENDINGS, CHUNKS)
def test_sampling_goes_on_as_it_would_have(
    request: GenerateRequest, after: int, how: Ending, chunks: list[int]
) -> None:
    check_resumed(toy_version, request, after, how, chunks)


@settings(deadline=None, max_examples=100)
@given(st.one_of(scripted_requests(), scripted_requests(), toy_requests()), CHUNKS)
def test_a_version_that_dies_between_its_last_token_and_the_end(request: GenerateRequest, chunks: list[int]) -> None:
    """The next one tells the end, and what had been held back until then."""
    make = toy_version if request.input_ids else scripted_version
    client, versions = served(make, request, chunks, endless=frozenset({2}))

    assert client.error is None
    check_same(merged(client), whole_answer(make(1), seeded(request, versions)), request)
    assert [version for version, _ in versions.calls] == [2, 1]
    assert client.responses[-1].choices[0].token_ids == [] or not request.stream


@settings(deadline=None, max_examples=60)
@given(scripted_requests(), st.integers(0, 5), st.integers(0, 5), ENDINGS, ENDINGS, CHUNKS)
def test_when_both_break_the_client_has_a_beginning_and_an_error(
    request: GenerateRequest, first: int, more: int, how: Ending, then: Ending, chunks: list[int]
) -> None:
    whole = whole_answer(scripted_version(1), request)
    length = len(whole.choices[0].token_ids)
    client, versions = served(scripted_version, request, chunks, v2=Break(first, how), v1=Break(first + more, then))
    if first + more >= length:
        assert client.error is None
        check_same(merged(client), whole, request)
        return
    assert client.error is not None
    check_part(client, whole)
    told = any(choice.token_ids for response in client.responses for choice in response.choices)
    assert (client.error.code is ErrorCode.RESUME_IMPOSSIBLE) == told
    assert [version for version, _ in versions.calls] == [2, 1]


@settings(deadline=None, max_examples=60)
@given(scripted_requests(), st.sampled_from(["pin", "false"]), st.integers(0, 11), ENDINGS, CHUNKS)
def test_who_named_a_version_gets_no_other(
    request: GenerateRequest, named: str, after: int, how: Ending, chunks: list[int]
) -> None:
    version = 2 if named == "pin" else 1
    route = RouteKeys(version=2) if named == "pin" else RouteKeys(canary="false")
    request = request.model_copy(update={"route": route})
    whole = whole_answer(scripted_version(version), request)
    client, versions = served(scripted_version, request, chunks, v1=Break(after, how), v2=Break(after, how))

    assert [number for number, _ in versions.calls] == [version]
    assert {response.served_version for response in client.responses} <= {version}
    if after >= len(whole.choices[0].token_ids):
        assert client.error is None
        check_same(merged(client), whole, request)
        return
    check_part(client, whole)
    assert client.error is not None
    assert client.error.code is ErrorCode.INTERNAL
    assert client.error.version == version
