"""Bodies of requests. Sampling parameters stand beside these keys under their own names (`SamplingParams`)."""

from typing import Any, TypeVar

from piccard_contract.errors import ErrorCode
from piccard_contract.sampling import MAX_LOGPROBS, SamplingParams
from piccard_contract.validation import explain
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from piccard_gateway.errors import ApiError, refused
from piccard_gateway.unsupported import check_names

# Of the input `extensions`, what a client may set; the rest is the gateway's.
CLIENT_EXTENSIONS = frozenset({"add_generation_prompt", "chat_template_kwargs", "coalesce_ms", "script"})

MAX_PROMPTS = 64

# Token ids go to the ensemble as INT64.
_MAX_TOKEN_ID = 2**63 - 1


class StreamOptions(BaseModel):
    """How a stream is told.

    Attributes:
        include_usage: send a last event with the usage and no choice.
        include_obfuscation: OpenAI's padding against readers of traffic; there is none here, so only false passes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    include_usage: bool = False
    include_obfuscation: bool = False


class Body(BaseModel):
    """What both endpoints take.

    Attributes:
        model: the service's name.
        version: a version of the service to be served by, beyond OpenAI's API.
        user: the caller of a caller: a sticky key of the routing.
        extensions: keys of the input `extensions`, beyond OpenAI's API.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    model: str = Field(max_length=128)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(default=None, max_length=512)
    version: int | None = Field(default=None, ge=1, lt=10**18)
    extensions: dict[str, Any] = Field(default_factory=dict)

    @field_validator("extensions", mode="before")
    @classmethod
    def _none_is_empty(cls, value: Any) -> Any:
        return {} if value is None else value

    def sampling(self, **own: Any) -> dict[str, Any]:
        """Sampling parameters as the ensemble takes them.

        Args:
            own: those that the endpoint tells by other names.

        Raises:
            ApiError: one is unknown, not served or out of its range.
        """
        rest = dict(self.model_extra or {})
        check_names(rest, set(type(self).model_fields))
        named = {name: value for name, value in rest.items() if name in SamplingParams.model_fields}
        named = {name: value for name, value in named.items() if value is not None} | own
        try:
            read = SamplingParams.model_validate(named)
        except ValidationError as error:
            raise _invalid(error) from error
        # As it was read, since a number may be sent as text or with a point; the router refuses a truth value for one.
        return {name: value if isinstance(value, bool) else getattr(read, name) for name, value in named.items()}


class ChatBody(Body):
    """Body of /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    max_completion_tokens: int | None = Field(default=None, ge=1)

    def sampling(self, **own: Any) -> dict[str, Any]:
        if self.top_logprobs and not self.logprobs:
            raise refused(ErrorCode.INVALID_VALUE, "top_logprobs needs logprobs: true", "top_logprobs")
        if self.logprobs:
            own["logprobs"] = self.top_logprobs or 0
        limit = self.max_completion_tokens or (self.model_extra or {}).get("max_tokens")
        # Without a limit a chat goes on to the context's end, as OpenAI's does.
        return super().sampling(**own, max_tokens=limit)


class CompletionBody(Body):
    """Body of /v1/completions.

    Attributes:
        prompt: a text, a list of texts, a list of token ids or a list of such lists.
        suffix: what follows the text to be written, for models that fill in the middle.
        echo: whether the prompt stands before the text, with its log-probabilities where those are asked for.
    """

    prompt: str | list[str] | list[int] | list[list[int]]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids.

        Raises:
            ApiError: there are none, or too many, or a token id is larger than the ensemble takes.
        """
        prompts: list[Any]
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            prompts = [self.prompt]
        else:
            prompts = list(self.prompt)
        if not prompts or not all(prompts):
            raise refused(ErrorCode.MISSING_INPUT, "prompt is empty; send a text or token ids", "prompt")
        if len(prompts) > MAX_PROMPTS:
            raise refused(
                ErrorCode.REQUEST_TOO_LARGE,
                f"a request takes {MAX_PROMPTS} prompts, {len(prompts)} were sent; send more requests",
                "prompt",
            )
        for prompt in prompts:
            if not isinstance(prompt, str) and max(map(abs, prompt)) > _MAX_TOKEN_ID:
                raise refused(ErrorCode.INVALID_TOKEN, f"prompt has a token id over {_MAX_TOKEN_ID}", "prompt")
        return prompts

    def sampling(self, **own: Any) -> dict[str, Any]:
        if self.logprobs is not None:
            own["logprobs"] = self.logprobs
            if self.echo:
                own["prompt_logprobs"] = self.logprobs
        return super().sampling(**own)


AnyBody = TypeVar("AnyBody", bound=Body)


def read_body(kind: type[AnyBody], body: bytes) -> AnyBody:
    """Read a body.

    Raises:
        ApiError: 400 for what is not JSON or has a wrong key, with the key.
    """
    try:
        read = kind.model_validate_json(body)
    except ValidationError as error:
        raise _invalid(error) from error
    foreign = sorted(set(read.extensions) - CLIENT_EXTENSIONS)
    if foreign:
        names = ", ".join(sorted(CLIENT_EXTENSIONS))
        raise refused(ErrorCode.UNKNOWN_PARAMETER, f"extensions takes {names}, not {foreign[0][:64]}", "extensions")
    if read.stream_options is not None:
        if not read.stream:
            raise refused(ErrorCode.INVALID_VALUE, "stream_options needs stream: true", "stream_options")
        if read.stream_options.include_obfuscation:
            raise refused(ErrorCode.UNSUPPORTED, "include_obfuscation is not served; leave it out", "stream_options")
    return read


def _invalid(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return refused(ErrorCode.INVALID_JSON, f"the body is not JSON: {first['msg'].partition(': ')[2]}")
    param = str(first["loc"][0]) if first["loc"] else None
    if first["type"] == "missing":
        return refused(ErrorCode.MISSING_INPUT, f"{param} is missing", param)
    return refused(ErrorCode.INVALID_VALUE, explain(error), param)
