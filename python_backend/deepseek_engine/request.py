"""Requests to an engine and what it answers with, as plain data."""

from dataclasses import dataclass, field
from typing import Literal

from piccard_contract.errors import ErrorCode
from piccard_contract.sampling import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class EngineRequest:
    """One request.

    Attributes:
        id: unique among the requests that are not finished.
        prompt_ids: the prompt, at least one token.
        params: sampling parameters.
        output_ids: tokens already generated elsewhere, which the request goes on after; n has to be 1 then. They count
            as output everywhere.
        priority: lower runs first.
        salt: requests share cached prefixes only within a salt (a tenant).
    """

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    output_ids: list[int] = field(default_factory=list)
    priority: int = 0
    salt: str = ""


@dataclass(slots=True)
class TokenLogprob:
    """Log-probability of a token at a position: log-softmax of the raw logits, and its rank (1 is the most likely)."""

    token_id: int
    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True)
class EngineError:
    """Why a request failed.

    Attributes:
        retry_after: seconds after which it may be sent again, or None.
    """

    code: ErrorCode
    message: str
    retry_after: float | None = None


@dataclass(slots=True)
class EngineOutput:
    """What a choice of a request has produced since its last output.

    Attributes:
        request_id: the request.
        choice: 0 to n - 1.
        token_ids: new tokens, a stop token included.
        text: new text; a stop token or string is left out unless it was asked for.
        logprobs: for each new token the log-probabilities by id, the chosen one first; None unless asked for.
        cumulative_logprob: of all output tokens so far, those generated elsewhere included; None without logprobs.
        finish_reason: set on the last output of a choice.
        stop_reason: the stop token's id or the stop string; None for end of sequence.
        num_prompt_tokens: tokens of the prompt.
        num_output_tokens: output tokens so far, those generated elsewhere included.
        num_cached_tokens: tokens of the prompt that came from the prefix cache.
        prompt_logprobs: once, on the first output of choice 0, where asked for: an entry a prompt token, None for the
            first. A resumed request does not repeat them.
        error: set where finish_reason is "error".
    """

    request_id: str
    choice: int
    token_ids: list[int]
    text: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    logprobs: list[dict[int, TokenLogprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[dict[int, TokenLogprob] | None] | None = None
    error: EngineError | None = None


@dataclass(slots=True)
class EngineStats:
    """Gauges and counters of an engine.

    Attributes:
        running: sequences that hold cache blocks.
        waiting: sequences queued, preempted ones included.
        free_blocks: blocks that can be allocated: empty ones and cached ones that nobody uses.
        total_blocks: blocks of the cache.
        cached_blocks: those of free_blocks whose content may be shared again.
        prefix_hit_tokens: prompt tokens taken from the cache since the start.
        preemptions: since the start.
        generated_tokens: since the start.
        prompt_tokens: tokens of the prompts of requests added since the start.
        pressure: level of the cache, 0 to 3 (`memory_pressure.Pressure`).
        refused: requests that were not taken, or given up in the queue, since the start.
        load: 0 to 1, how full the engine is of sequences, cache and queue, whichever is fullest.
    """

    running: int
    waiting: int
    free_blocks: int
    total_blocks: int
    cached_blocks: int
    prefix_hit_tokens: int
    preemptions: int
    generated_tokens: int
    prompt_tokens: int
    pressure: int = 0
    refused: int = 0
    load: float = 0.0
