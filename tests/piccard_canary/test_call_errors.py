"""Triton's sentences about failed calls."""

import pytest
from piccard_canary.call_errors import call_error
from piccard_contract.errors import ErrorCode


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (
            "Failed to process the request(s) for model 'deepseek_llm_0_0', message: Stub process 'x' is not healthy.",
            "VERSION_DIED",
        ),
        ("Request for unknown model: 'deepseek_llm' version 3 is not found", "UNAVAILABLE"),
        ("Failed for execute the inference request. Model 'deepseek_llm' is not ready.", "UNAVAILABLE"),
        ("[OVERLOADED retry_after=2] full", "OVERLOADED"),
        ("something else", "INTERNAL"),
    ],
)
def test_codes(text: str, code: str) -> None:
    error = call_error(text, 3)

    assert error.code is ErrorCode(code)
    assert error.version == 3
