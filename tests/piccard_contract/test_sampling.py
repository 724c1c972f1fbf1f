"""Names and ranges of sampling parameters."""

from typing import Any

import pytest
from piccard_contract.sampling import SamplingParams
from piccard_contract.validation import explain
from pydantic import ValidationError


@pytest.mark.parametrize(
    "settings",
    [
        {"n": 0},
        {"n": 17, "temperature": 1},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0},
        {"top_p": 1.01},
        {"top_p": float("nan")},
        {"top_k": -2},
        {"top_k": 2**31},
        {"max_tokens": 10**400},
        {"min_tokens": 10**400, "max_tokens": None},
        {"min_p": 1.5},
        {"presence_penalty": 2.1},
        {"frequency_penalty": float("nan")},
        {"repetition_penalty": 0},
        {"repetition_penalty": 1e-30},
        {"seed": 2**63},
        {"stop": [""]},
        {"stop": ["x"] * 17},
        {"stop": ["x"], "detokenize": False},
        {"stop_token_ids": [-1]},
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"min_tokens": 5, "max_tokens": 4},
        {"logprobs": 21},
        {"prompt_logprobs": -1},
        {"logit_bias": {"-1": 1.0}},
        {"logit_bias": {"5": "nan"}},
        {"logit_bias": {"5": float("inf")}},
        {"n": 2, "temperature": 0},
        {"best_of": 2},
    ],
    ids=str,
)
def test_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SamplingParams.model_validate(settings)


def test_every_whole_number_fits_a_tensor() -> None:
    """Engines keep them beside those of other requests, in 32 bits or, seeds, in 64."""
    for name, field in SamplingParams.model_json_schema()["properties"].items():
        for kind in field.get("anyOf", [field]):
            if kind.get("type") == "integer":
                most = kind.get("maximum", kind.get("exclusiveMaximum"))
                assert most is not None, name
                assert most <= (2**63 if name == "seed" else 2**31 - 1), name


def test_one_stop_string_is_a_list() -> None:
    assert SamplingParams.model_validate({"stop": "END"}).stop == ["END"]


def test_logit_bias_is_clamped() -> None:
    assert SamplingParams.model_validate({"logit_bias": {"7": 1e9, "8": -1e9}}).logit_bias == {7: 100.0, 8: -100.0}


def test_no_end_may_be_asked_for() -> None:
    assert SamplingParams.model_validate({"max_tokens": None}).max_tokens is None


@pytest.mark.parametrize(("seed", "fixed"), [(None, None), (-1, None), (0, 0), (5, 5)])
def test_fixed_seed(seed: int | None, fixed: int | None) -> None:
    assert SamplingParams(seed=seed).fixed_seed == fixed


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (1e-6, True), (1e-4, False), (1.0, False)])
def test_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({"n": 17}, "1 to 16 choices"),
        ({"n": 0}, "1 to 16 choices"),
        ({"logprobs": -1}, "0 to 20 tokens"),
        ({"logprobs": "21"}, "0 to 20 tokens"),
        ({"prompt_logprobs": -1}, "0 to 20 tokens"),
    ],
)
def test_a_range_narrower_than_vllms_is_told(settings: dict[str, Any], limit: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        SamplingParams.model_validate(settings)

    assert limit in explain(refusal.value)
    assert next(iter(settings)) in explain(refusal.value)


def test_what_is_no_number_is_told_as_that() -> None:
    with pytest.raises(ValidationError) as refusal:
        SamplingParams.model_validate({"logprobs": "many"})

    assert "valid integer" in explain(refusal.value)
