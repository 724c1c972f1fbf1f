"""How a stream that one version began is continued by another."""

from dataclasses import dataclass, field

from piccard_contract.request import GenerateRequest

from piccard_canary.availability import LoadedVersion


@dataclass(slots=True)
class Progress:
    """What a request has brought so far, over all its attempts.

    Attributes:
        token_ids: of the only choice; with several choices nothing is kept, for such a stream is never resumed.
        logprob: cumulative_logprob of these tokens, where the client asked for it.
        any_tokens: whether a version gave tokens of any choice.
        has_prompt_logprobs: whether prompt_logprobs have come, which come once.
    """

    token_ids: list[int] = field(default_factory=list)
    logprob: float | None = None
    any_tokens: bool = False
    has_prompt_logprobs: bool = False


def obstacle(request: GenerateRequest, failed: LoadedVersion | None, other: LoadedVersion) -> str | None:
    """Why `other` cannot go on with what `failed` began, or None where it can.

    Tokens mean the same text only under one tokenizer, and follow the same prompt only under one chat template.
    """
    if request.sampling.n > 1:
        return f"n is {request.sampling.n}; only a request of one choice can be resumed"
    if failed is None or not failed.tokenizer_hash or failed.tokenizer_hash != other.tokenizer_hash:
        return "their tokenizers differ"
    if failed.template_hash != other.template_hash:
        return "their chat templates differ"
    return None


def resumed_request(request: GenerateRequest, progress: Progress) -> GenerateRequest:
    """The request that goes on after `progress`: its tokens count as output, for max_tokens and penalties too."""
    changes: dict[str, object] = {"output_ids": [*request.output_ids, *progress.token_ids]}
    if progress.has_prompt_logprobs:
        changes["sampling"] = request.sampling.model_copy(update={"prompt_logprobs": None})
    return request.model_copy(update=changes)
