"""What an attempt to go on is asked."""

import pytest
from piccard_canary.availability import LoadedVersion
from piccard_canary.resume import Progress, obstacle, resumed_request
from piccard_contract.request import GenerateRequest
from piccard_contract.sampling import SamplingParams

ONE = LoadedVersion(1, 11, "tokens", "chat")


def request(**sampling: int) -> GenerateRequest:
    return GenerateRequest(id="r", text="a", output_ids=[5], sampling=SamplingParams.model_validate(sampling))


def test_tokens_so_far_become_output() -> None:
    going_on = resumed_request(request(max_tokens=9, prompt_logprobs=1), Progress([6, 7], has_prompt_logprobs=True))

    assert going_on.output_ids == [5, 6, 7]
    # They count towards it.
    assert going_on.sampling.max_tokens == 9
    assert going_on.sampling.prompt_logprobs is None
    assert going_on.text == "a"


def test_prompt_logprobs_that_have_not_come_are_asked_for() -> None:
    assert resumed_request(request(prompt_logprobs=1), Progress([6])).sampling.prompt_logprobs == 1


@pytest.mark.parametrize(
    ("failed", "other", "told"),
    [
        (ONE, LoadedVersion(2, 12, "tokens", "chat"), None),
        (ONE, LoadedVersion(2, 12, "others", "chat"), "tokenizers"),
        (ONE, LoadedVersion(2, 12, "tokens", "other"), "templates"),
        (LoadedVersion(1, 11), LoadedVersion(2, 12), "tokenizers"),
        (None, ONE, "tokenizers"),
    ],
)
def test_obstacles(failed: LoadedVersion | None, other: LoadedVersion, told: str | None) -> None:
    found = obstacle(request(), failed, other)

    assert (found is None) if told is None else (found is not None and told in found)


def test_several_choices_cannot_go_on() -> None:
    assert "n is 2" in (obstacle(request(n=2), ONE, ONE) or "")
