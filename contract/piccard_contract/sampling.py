"""Sampling parameters of one request: names, defaults and ranges of vLLM's `SamplingParams`."""

from typing import Annotated, Any

from pydantic import (
    AllowInfNan,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
# Characters of one stop string: each is a node of an automaton, which is built for the request that brings it.
MAX_STOP_LENGTH = 1024
# Entries of logit_bias and of stop_token_ids; OpenAI's API takes some hundred.
MAX_TOKEN_ENTRIES = 4096
MAX_CHOICES = 16
# Of numbers that engines keep in tensors beside those of other requests: one that did not fit would fail them all.
MAX_INT = 2**31 - 1
# A smaller divisor makes numbers of logits that are none, which would seem to be the version's fault.
MIN_REPETITION_PENALTY = 0.01

# What is told of a value out of its range where vLLM's own range is wider.
_NARROWER = {
    "n": f"a request takes 1 to {MAX_CHOICES} choices; send more requests for more",
    "logprobs": f"0 to {MAX_LOGPROBS} tokens are told at a position, and not the whole vocabulary (-1 in vLLM)",
    "prompt_logprobs": f"0 to {MAX_LOGPROBS} tokens are told at a position, and not the whole vocabulary (-1 in vLLM)",
}

TokenId = Annotated[int, Field(ge=0)]
Bias = Annotated[float, AllowInfNan(False)]


class SamplingParams(BaseModel):
    """Names, defaults and ranges as in vLLM's `SamplingParams`; unknown names are refused.

    Attributes:
        n: choices generated for the prompt.
        temperature: divides the logits; 0 is greedy.
        top_p: the smallest set of tokens whose probability reaches it is kept.
        top_k: the k most likely tokens are kept; 0 or -1 keeps all.
        min_p: tokens under this share of the most likely one's probability are dropped.
        presence_penalty: taken from the logits of tokens that were generated before.
        frequency_penalty: the same, times how often.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output.
        seed: with it the text is the same whatever else runs; -1 means none.
        stop: strings that end the text, at most 16 of 1024 characters; one string may be sent without a list.
        stop_token_ids: tokens that end the text, at most 4096.
        include_stop_str_in_output: keep the stop string in the text.
        ignore_eos: go on after the end-of-sequence token.
        logprobs: how many of the most likely tokens are told at each position, beside the chosen one; never all (-1).
        prompt_logprobs: the same for the prompt's positions.
        max_tokens: tokens generated at most; null means up to the context's end.
        min_tokens: end-of-sequence and stop tokens are masked until then.
        logit_bias: added to the logits of token ids, each clamped to [-100, 100]; at most 4096.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: accepted for vLLM's sake; fast tokenizers have no such spaces to leave out.
        detokenize: without it only token_ids come.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    temperature: float = Field(default=1.0, ge=0.0, le=100.0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=-1, le=MAX_INT)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(default=1.0, ge=MIN_REPETITION_PENALTY, le=100.0)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: list[str] = Field(default_factory=list, max_length=MAX_STOP_STRINGS)
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=MAX_TOKEN_ENTRIES)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = Field(default=16, ge=1, le=MAX_INT)
    min_tokens: int = Field(default=0, ge=0, le=MAX_INT)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    logit_bias: dict[TokenId, Bias] = Field(default_factory=dict, max_length=MAX_TOKEN_ENTRIES)
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True

    @field_validator("n", "logprobs", "prompt_logprobs", mode="wrap")
    @classmethod
    def _within(cls, value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            if error.errors(include_url=False)[0]["type"] not in ("greater_than_equal", "less_than_equal"):
                raise
            raise ValueError(_NARROWER[str(info.field_name)]) from error

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        if value is None:
            return []
        return [value] if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, value: list[str]) -> list[str]:
        if "" in value:
            raise ValueError("an empty stop string would end every text at once; leave it out")
        if max(map(len, value), default=0) > MAX_STOP_LENGTH:
            raise ValueError(f"a stop string has at most {MAX_STOP_LENGTH} characters; shorten it")
        return value

    @field_validator("stop_token_ids", "logit_bias", mode="before")
    @classmethod
    def _none_is_empty(cls, value: Any, info: Any) -> Any:
        if value is None:
            return {} if info.field_name == "logit_bias" else []
        return value

    @field_validator("logit_bias")
    @classmethod
    def _clamp(cls, value: dict[int, float]) -> dict[int, float]:
        return {token: min(100.0, max(-100.0, bias)) for token, bias in value.items()}

    @model_validator(mode="after")
    def _consistent(self) -> "SamplingParams":
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")
        if self.n > 1 and self.greedy:
            raise ValueError("n > 1 at temperature 0 gives the same text n times; raise temperature or set n to 1")
        if self.stop and not self.detokenize:
            raise ValueError("stop strings need detokenize: true")
        return self

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken (vLLM treats temperatures under 1e-5 as 0)."""
        return self.temperature < 1e-5

    @property
    def fixed_seed(self) -> int | None:
        """The seed, or None where the engine draws one (vLLM reads -1 as none)."""
        return None if self.seed in (None, -1) else self.seed
