"""What a request is expected to cost."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from piccard_canary.availability import LoadedVersion
from piccard_canary.token_cost import Outlook, estimate, outlook
from piccard_contract.policy import Policy
from piccard_contract.request import Charge, GenerateRequest
from piccard_contract.sampling import SamplingParams


def cost(found: Outlook | None = None, *, n: int = 1, max_tokens: int | None = 10, **prompt: Any) -> Charge:
    sampling = SamplingParams(n=n, max_tokens=max_tokens)
    return estimate(GenerateRequest(id="r", sampling=sampling, **prompt), found or Outlook(0.0, 4.0, 100))


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ({"text": "a" * 40}, 10),
        ({"text": "a" * 41}, 11),
        # Bytes, not characters.
        ({"text": "深海" * 4}, 6),
        ({"input_ids": [7] * 40}, 40),
        # Texts alone: their brackets and keys are no tokens of the prompt.
        ({"messages": [{"role": "user", "content": "a" * 36}]}, 10),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a" * 36}]}, {"seen": True}]}, 11),
    ],
)
def test_prompts(prompt: dict[str, Any], tokens: int) -> None:
    assert cost(**prompt) == Charge(tokens=tokens + 10, prompt=tokens)


def test_a_version_that_reads_more_bytes_a_token_makes_prompts_cheaper() -> None:
    assert cost(Outlook(0.0, 2.0), text="a" * 40).prompt == 20
    assert cost(Outlook(0.0, 8.0), text="a" * 40).prompt == 5


def test_every_choice_is_generated_and_the_prompt_is_read_once() -> None:
    assert cost(n=3, text="a" * 40).tokens == 10 + 30


def test_tokens_that_are_there_already_count_within_max_tokens() -> None:
    assert cost(text="a" * 40, output_ids=[1, 2, 3]).tokens == 20


def test_without_max_tokens_the_rest_of_the_context_is_expected() -> None:
    assert cost(max_tokens=None, text="a" * 40).tokens == 100
    assert cost(max_tokens=None, text="a" * 4000).tokens == 1001


def version(number: int, load: float, ratio: float = 4.0) -> LoadedVersion:
    return LoadedVersion(number, pid=1, load=load, bytes_per_token=ratio, max_model_len=50)


@pytest.mark.parametrize(
    ("ready", "policy", "load"),
    [
        ([version(1, 0.5)], Policy(), 0.5),
        ([version(1, 0.5), version(2, 1.0)], Policy(), 0.5),
        ([version(1, 0.5), version(2, 1.0)], Policy(canary=2, traffic_ratio=0.25), 0.625),
        # A ratio that is for nobody.
        ([version(1, 0.5)], Policy(traffic_ratio=0.25), 0.5),
        ([version(1, 0.5)], Policy(canary=1, traffic_ratio=1.0), 0.5),
        ([version(1, 0.5)], Policy(canary=2, traffic_ratio=0.25), 0.5),
        ([version(2, 0.75)], Policy(canary=2, traffic_ratio=0.25), 0.75),
        ([version(2, 0.75), version(3, 0.25)], Policy(), 0.5),
        ([], Policy(), 1.0),
    ],
)
def test_the_load_is_that_of_the_versions_a_request_may_come_to(
    ready: list[LoadedVersion], policy: Policy, load: float
) -> None:
    found = outlook({one.version: one for one in ready}, policy, 1)
    assert found.load == pytest.approx(load)


def test_the_tokenizer_is_stables() -> None:
    ready = {1: version(1, 0.0, 3.0), 2: version(2, 0.0, 5.0)}
    assert outlook(ready, Policy(canary=2, traffic_ratio=0.9), 1).bytes_per_token == 3.0
    assert outlook(ready, Policy(canary=2), 7).bytes_per_token in (3.0, 5.0)
    assert outlook({}, Policy(), None) == Outlook(1.0, 4.0, 0)


@given(st.dictionaries(st.integers(1, 5), st.floats(0, 1)), st.floats(0, 1), st.integers(1, 5), st.integers(1, 5))
def test_a_load_is_a_share(loads: dict[int, float], ratio: float, canary: int, stable: int) -> None:
    ready = {number: version(number, load) for number, load in loads.items()}
    found = outlook(ready, Policy(canary=canary, traffic_ratio=ratio), stable)
    assert 0.0 <= found.load <= 1.0
