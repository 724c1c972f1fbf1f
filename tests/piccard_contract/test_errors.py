"""The head of an error survives what Triton and its clients put around it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from piccard_contract.errors import ERROR_KINDS, ErrorCode, Fault, RequestError, kind_of, parse_error

# As tritonclient and Triton write them.
PREFIXES = (
    "",
    "in ensemble 'deepseek', ",
    "[StatusCode.INVALID_ARGUMENT] in ensemble 'deepseek_unary', ",
    "[400] ",
    "[BAD] ",
    "[SOMETHING] [400] Failed to process the request(s) for model 'deepseek_router_0_0', message: ",
)

errors = st.builds(
    RequestError,
    st.sampled_from(ErrorCode),
    # No head within the sentence: the outermost one counts.
    st.text(st.characters(exclude_characters="[", exclude_categories=["Cs"]), max_size=60),
    retry_after=st.none() | st.floats(0, 1e6).map(lambda seconds: float(f"{seconds:g}")),
    version=st.none() | st.integers(1, 10**18 - 1),
)


def same(one: RequestError, other: RequestError) -> bool:
    return (one.code, one.message, one.retry_after, one.version) == (
        other.code,
        other.message,
        other.retry_after,
        other.version,
    )


@given(errors, st.sampled_from(PREFIXES))
def test_head_round_trip(error: RequestError, prefix: str) -> None:
    found = parse_error(prefix + error.head())

    assert found is not None
    assert same(found, error)


@given(st.text())
def test_any_text_is_an_error_or_none(text: str) -> None:
    found = parse_error(text)

    assert found is None or found.code in ErrorCode


@pytest.mark.parametrize("text", ["", "plain", "[400] bad", "[NOT_OF_THE_LIST] x", "[INTERNAL version=x] y"])
def test_no_head(text: str) -> None:
    assert parse_error(text) is None


def test_head_without_sentence() -> None:
    # Something on the way may strip the space.
    found = parse_error("[CANCELLED]")

    assert found is not None
    assert found.code is ErrorCode.CANCELLED


def test_message_is_one_line() -> None:
    assert RequestError(ErrorCode.INTERNAL, "two\n  lines").head() == "[INTERNAL] two lines"


def test_at_adds_the_version() -> None:
    error = RequestError(ErrorCode.OVERLOADED, "full", retry_after=2.5).at(3)

    assert str(error) == "[OVERLOADED version=3 retry_after=2.5] full"


@pytest.mark.parametrize("code", ErrorCode)
def test_every_code_has_a_kind(code: ErrorCode) -> None:
    kind = kind_of(code)

    assert (kind.fault is Fault.CLIENT) == (kind.http < 500 or code is ErrorCode.UNSUPPORTED)
    assert kind.meaning.endswith(".")
    assert set(ERROR_KINDS) == set(ErrorCode)
