"""Token counts as OpenAI's API tells them."""

from typing import Any

from piccard_contract.response import Usage


def usage_of(counts: list[Usage]) -> dict[str, Any]:
    """The sum over the prompts of a request."""
    prompt = sum(count.prompt_tokens for count in counts)
    completion = sum(count.completion_tokens for count in counts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(count.cached_tokens for count in counts)},
    }
