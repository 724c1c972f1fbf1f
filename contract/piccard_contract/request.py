"""A request as data: read from tensors and parameters, validated, and written back as tensors.

Admission reads a client's request with this; a version that is called itself reads it with the same code.
Nothing here knows numpy or Triton: tensors are lists of plain values, converted by the adapters.
"""

import hashlib
import hmac
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from piccard_contract.errors import ErrorCode, RequestError
from piccard_contract.routing import RouteKeys
from piccard_contract.sampling import SamplingParams
from piccard_contract.tensors import INPUT_SPECS
from piccard_contract.unserved import UNSERVED, refusal
from piccard_contract.validation import closest, explain

# Bytes of text, messages and parameters together. V3's longest context is some 600 kB of text.
MAX_REQUEST_BYTES = 8 * 2**20

# Parameters that Triton itself or its clients set on a request; they are none of ours and pass.
TRITON_PARAMETERS = frozenset(
    {
        "binary_data_output",
        # Of /generate, which makes it a parameter too.
        "id",
        "priority",
        "sequence_end",
        "sequence_id",
        "sequence_start",
        "timeout",
        "triton_enable_empty_final_response",
        "triton_final_response",
    }
)

# Headers that --*-header-forward-pattern lets through beside the policy's own.
FORWARDED_HEADERS = ("x-canary", "x-request-id", "x-session-id", "x-user", "traceparent")

# Levels of nesting in JSON; pydantic serialises no more than some 255.
MAX_JSON_DEPTH = 64

# Values of one JSON text, those within others included: each takes many times its bytes when it is read.
MAX_JSON_VALUES = 20_000
MAX_CHAT_VALUES = 200_000

# Characters of a request id; it is noted in the request log.
MAX_ID_LENGTH = 256

# JSON keys and parameters beside the sampling parameters.
PIN_PARAMETER = "version"
USER_PARAMETER = "user"

# Strings of a JSON text, found without ever going back.
_TEXTS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)

_RETURN_FLAGS = {
    "return_finish_reason": "finish_reason",
    "return_cumulative_logprob": "cumulative_logprob",
    "return_logprobs": "logprobs",
    "return_num_input_tokens": "num_input_tokens",
    "return_num_output_tokens": "num_output_tokens",
}


class _Part(BaseModel):
    # Pydantic keeps short strings that it read, up to 16,384 in a process: ids, tokens and prompts never come again.
    model_config = ConfigDict(extra="forbid", frozen=True, cache_strings="keys")


class GatewayClaims(_Part):
    """Tenant and priority, believed only with the gateway's signature."""

    tenant: str = Field(default="", max_length=128)
    priority: int = Field(default=0, ge=-100, le=100)
    signature: str = ""

    def sign(self, secret: bytes) -> "GatewayClaims":
        """The same claims with their signature (HMAC-SHA256, hex)."""
        return self.model_copy(update={"signature": self._digest(secret)})

    def signed_by(self, secret: bytes) -> bool:
        """Whether the signature is that of `secret`, compared in constant time."""
        return hmac.compare_digest(self.signature.encode(), self._digest(secret).encode())

    def _digest(self, secret: bytes) -> str:
        claims = json.dumps([self.tenant, self.priority]).encode()
        return hmac.new(secret, claims, hashlib.sha256).hexdigest()


class Attempt(_Part):
    """What the router tells a version about an attempt; clients may not set it.

    Attributes:
        tenant, priority, signature: what the gateway vouched for.
        router, process: owner and process id of the router, which says whether somebody still reads the answer.
        slot: where the router tells how many responses it has taken (piccard_contract.receipts); None tells nothing.

    Keys that are not known are ignored: the router may be newer than the snapshot that it calls.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, cache_strings="keys")

    cancel_token: str
    tenant: str = ""
    priority: int = 0
    signature: str = ""
    router: str = Field(default="", pattern=r"^[a-z0-9_.]{0,64}$")
    process: int = Field(default=0, ge=0)
    slot: int | None = Field(default=None, ge=0)

    @property
    def claims(self) -> GatewayClaims | None:
        """Tenant and priority as the gateway sent them; None where it named none."""
        if not (self.tenant or self.priority):
            return None
        return GatewayClaims.model_construct(tenant=self.tenant, priority=self.priority, signature=self.signature)


class Charge(_Part):
    """What admission took from the buckets for a request; the router says at its end what it came to.

    Attributes:
        tokens: of prompt and output, as they were estimated.
        prompt: those of the prompt.
    """

    tokens: int = Field(ge=0)
    prompt: int = Field(default=0, ge=0)


class RequestExtensions(_Part):
    """Keys of the input `extensions`.

    Attributes:
        cancel: end the generation that holds this token; nothing else of the request is read.
        announce: with stream, send an empty response with the cancel token where the first token takes a while.
        coalesce_ms: with stream, wait this long between responses, so that each carries more tokens.
        separate_reasoning: keep the text within <think> out of text_output; it comes in details.reasoning.
        add_generation_prompt: of the chat template.
        chat_template_kwargs: further variables of the chat template.
        script: what a version with `runner: scripted` plays; refused by every other.
        gateway: tenant and priority, signed by the gateway.
        attempt: set by the router.
    """

    cancel: str | None = Field(default=None, min_length=1, max_length=256)
    announce: bool = False
    coalesce_ms: int = Field(default=0, ge=0, le=10_000)
    separate_reasoning: bool = False
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    script: dict[str, Any] | None = None
    gateway: GatewayClaims | None = None
    attempt: Attempt | None = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _not_sent_otherwise(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in ("messages", "add_generation_prompt"):
            if name in value:
                raise ValueError(f"{name} is sent beside it; leave it out of chat_template_kwargs")
        return value


class GenerateRequest(_Part):
    """One generation, read and validated.

    Attributes:
        id: the client's request id, or one that was made.
        text, messages, input_ids: the prompt; exactly one is set unless `extensions.cancel` is.
        output_ids: tokens already generated elsewhere.
        repeat_prompt: whether a response without stream starts with the prompt's text.
        returns: names of the optional outputs that were asked for.
        charge: set by admission where tokens are limited; no version is told.
    """

    id: str
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    input_ids: list[int] | None = None
    output_ids: list[int] = Field(default_factory=list)
    stream: bool = False
    repeat_prompt: bool = False
    returns: frozenset[str] = frozenset()
    sampling: SamplingParams = Field(default_factory=SamplingParams)
    extensions: RequestExtensions = Field(default_factory=RequestExtensions)
    route: RouteKeys = Field(default_factory=RouteKeys)
    charge: Charge | None = None


def parse_request(
    inputs: Mapping[str, Sequence[Any]],
    parameters: Mapping[str, Any],
    *,
    request_id: str,
    canary_header: str = "X-Canary",
    sticky_keys: Sequence[str] = (),
) -> GenerateRequest:
    """Read a request.

    Args:
        inputs: tensor name -> its values, flat; BYTES as bytes or str.
        parameters: request parameters: forwarded headers, gRPC parameters, JSON keys of /generate.
        request_id: used where neither x-request-id nor the JSON key id was sent.
        canary_header, sticky_keys: names of the policy; letter case does not matter.

    Raises:
        RequestError: a client's fault, with what to change.
    """
    _check_size(inputs, parameters)
    extensions = _extensions(inputs)
    folded = {str(name).lower(): value for name, value in parameters.items()}
    identity = _identity(folded, request_id)
    if extensions.cancel is not None:
        return GenerateRequest(id=identity, extensions=extensions)
    text, messages, input_ids = _prompt(inputs)
    stream = _flag(inputs, "stream", default=False)
    return GenerateRequest(
        id=identity,
        text=text,
        messages=messages,
        input_ids=input_ids,
        output_ids=_output_ids(inputs),
        stream=stream,
        repeat_prompt=_repeat_prompt(inputs, stream=stream, text=text),
        returns=frozenset(output for flag, output in _RETURN_FLAGS.items() if _flag(inputs, flag, default=False)),
        sampling=_sampling(inputs, folded, routing={canary_header.lower(), *(key.lower() for key in sticky_keys)}),
        extensions=extensions,
        route=RouteKeys(
            version=_pin(folded),
            canary=_header(folded, canary_header.lower()),
            sticky=_sticky(folded, sticky_keys),
        ),
    )


def request_inputs(request: GenerateRequest) -> dict[str, list[Any]]:
    """The tensors that tell a version the same request, tensor name -> values (BYTES as str)."""
    inputs: dict[str, list[Any]] = {
        "stream": [request.stream],
        "sampling_parameters": [request.sampling.model_dump_json(exclude_defaults=True)],
        "extensions": [request.extensions.model_dump_json(exclude_defaults=True)],
    }
    if not request.stream:
        inputs["exclude_input_in_output"] = [not request.repeat_prompt]
    if request.text is not None:
        inputs["text_input"] = [request.text]
    if request.messages is not None:
        inputs["messages"] = [json.dumps(request.messages, ensure_ascii=False)]
    if request.input_ids is not None:
        inputs["input_ids"] = list(request.input_ids)
    if request.output_ids:
        inputs["output_ids"] = list(request.output_ids)
    for flag, output in _RETURN_FLAGS.items():
        if output in request.returns:
            inputs[flag] = [True]
    return inputs


def check_tensor_bytes(sizes: Mapping[str, int]) -> None:
    """Refuse tensors that are too large, before they are made lists of Python's values, which take many times as much.

    Args:
        sizes: tensor name -> bytes of its elements, where those of BYTES count as eight each.

    Raises:
        RequestError: REQUEST_TOO_LARGE.
    """
    _check_bytes(sum(sizes.values()))


def _check_size(inputs: Mapping[str, Sequence[Any]], parameters: Mapping[str, Any]) -> None:
    size = sum(len(value) for values in inputs.values() for value in values if isinstance(value, (bytes, str)))
    size += sum(8 * len(inputs[name]) for name in ("input_ids", "output_ids") if name in inputs)
    size += sum(len(str(value)) for value in parameters.values())
    _check_bytes(size)


def _check_bytes(size: int) -> None:
    if size > MAX_REQUEST_BYTES:
        raise RequestError(
            ErrorCode.REQUEST_TOO_LARGE, f"the request has {size} bytes, the limit is {MAX_REQUEST_BYTES}; shorten it"
        )


def _string(inputs: Mapping[str, Sequence[Any]], name: str) -> str | None:
    values = inputs.get(name)
    if values is None or len(values) == 0:
        return None
    if len(values) > 1:
        raise RequestError(ErrorCode.INVALID_VALUE, f"{name} takes one element, {len(values)} were sent")
    value = values[0]
    try:
        text = value.decode("utf-8") if isinstance(value, bytes) else str(value)
        text.encode("utf-8")
    except UnicodeError as error:
        raise RequestError(ErrorCode.INVALID_ENCODING, f"{name} is not valid UTF-8: {error}") from error
    return text


def _flag(inputs: Mapping[str, Sequence[Any]], name: str, *, default: bool) -> bool:
    values = inputs.get(name)
    if values is None or len(values) == 0:
        return default
    if len(values) > 1:
        raise RequestError(ErrorCode.INVALID_VALUE, f"{name} takes one element, {len(values)} were sent")
    return bool(values[0])


def _json(inputs: Mapping[str, Sequence[Any]], name: str, most: int = MAX_JSON_VALUES) -> Any:
    """The parsed JSON of a tensor, of at most so many values, or None where it was left out or is empty."""
    text = _string(inputs, name)
    if text is None or not text.strip():
        return None
    # Every value but the first has a comma, bracket or brace before it.
    if _openings(text) > most and _openings(_TEXTS.sub("", text)) > most:
        raise RequestError(ErrorCode.REQUEST_TOO_LARGE, f"{name} has more than {most} values; send fewer")
    try:
        value = json.loads(text, parse_constant=_no_constant)
        # Lone surrogates parse as JSON and cannot be written as UTF-8 afterwards.
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeError as error:
        raise RequestError(ErrorCode.INVALID_ENCODING, f"{name} holds half a surrogate pair: {error}") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(ErrorCode.INVALID_JSON, f"{name} is not JSON: {error}") from error
    if _deeper(value, MAX_JSON_DEPTH):
        raise RequestError(ErrorCode.INVALID_JSON, f"{name} is nested more than {MAX_JSON_DEPTH} levels deep")
    return value


def _openings(text: str) -> int:
    return sum(map(text.count, ",[{"))


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def _deeper(value: Any, levels: int) -> bool:
    """Whether `value` has containers within containers beyond `levels`."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    if items is None:
        return False
    return levels == 0 or any(_deeper(item, levels - 1) for item in items)


def _extensions(inputs: Mapping[str, Sequence[Any]]) -> RequestExtensions:
    value = _json(inputs, "extensions")
    if value is None:
        return RequestExtensions()
    if not isinstance(value, dict):
        raise RequestError(ErrorCode.INVALID_JSON, "extensions must be a JSON object")
    try:
        return RequestExtensions.model_validate(value)
    except ValidationError as error:
        raise _refusal(error, "extensions", RequestExtensions) from error


def _prompt(inputs: Mapping[str, Sequence[Any]]) -> tuple[str | None, list[dict[str, Any]] | None, list[int] | None]:
    for name in ("image", "embedding_request"):
        if len(inputs.get(name, ())) > 0:
            meaning = INPUT_SPECS[name].meaning
            raise RequestError(ErrorCode.UNSUPPORTED, f"{name} is {meaning[0].lower()}{meaning[1:].rstrip('.')}")
    given = [name for name in ("text_input", "messages", "input_ids") if _given(inputs, name)]
    if not given:
        empty = [name for name in ("text_input", "messages", "input_ids") if name in inputs]
        told = f"{empty[0]} is empty" if empty else "no prompt was sent"
        raise RequestError(ErrorCode.MISSING_INPUT, f"{told}; send one of text_input, messages and input_ids")
    if len(given) > 1:
        raise RequestError(ErrorCode.CONFLICTING_INPUTS, f"{' and '.join(given)} were sent; send only one of them")
    if given == ["text_input"]:
        return _string(inputs, "text_input"), None, None
    if given == ["input_ids"]:
        return None, None, _ids(inputs, "input_ids")
    messages = _json(inputs, "messages", MAX_CHAT_VALUES)
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise RequestError(ErrorCode.INVALID_JSON, "messages must be a JSON list of objects with role and content")
    if not messages:
        raise RequestError(ErrorCode.MISSING_INPUT, "messages is empty; send at least one message")
    return None, messages, None


def _given(inputs: Mapping[str, Sequence[Any]], name: str) -> bool:
    values = inputs.get(name)
    if values is None or len(values) == 0:
        return False
    return name == "input_ids" or len(values) > 1 or len(values[0]) > 0


def _ids(inputs: Mapping[str, Sequence[Any]], name: str) -> list[int]:
    ids = [int(value) for value in inputs.get(name, ())]
    if any(token < 0 for token in ids):
        raise RequestError(ErrorCode.INVALID_TOKEN, f"{name} holds {min(ids)}; token ids are 0 or more")
    return ids


def _output_ids(inputs: Mapping[str, Sequence[Any]]) -> list[int]:
    return _ids(inputs, "output_ids")


def _repeat_prompt(inputs: Mapping[str, Sequence[Any]], *, stream: bool, text: str | None) -> bool:
    """As Triton's vLLM backend: repeated by default, never with stream. Chats and ids are not repeated by default."""
    exclude = _flag(inputs, "exclude_input_in_output", default=stream or text is None)
    if stream and not exclude:
        raise RequestError(
            ErrorCode.INVALID_VALUE, "exclude_input_in_output = false is not possible with stream = true; leave it out"
        )
    if not exclude and text is None:
        raise RequestError(
            ErrorCode.INVALID_VALUE, "exclude_input_in_output = false needs text_input; leave it out with other prompts"
        )
    return not exclude


def _sampling(
    inputs: Mapping[str, Sequence[Any]], parameters: Mapping[str, Any], *, routing: set[str]
) -> SamplingParams:
    value = _json(inputs, "sampling_parameters")
    if value is not None and not isinstance(value, dict):
        raise RequestError(ErrorCode.INVALID_JSON, "sampling_parameters must be a JSON object")
    named: dict[str, Any] = dict(value or {})
    passed = TRITON_PARAMETERS | routing | {PIN_PARAMETER, USER_PARAMETER} | set(FORWARDED_HEADERS)
    for name, setting in parameters.items():
        if name in passed:
            continue
        if name in named:
            raise RequestError(
                ErrorCode.INVALID_VALUE, f"{name} was sent in sampling_parameters and beside it; send it once"
            )
        if name not in SamplingParams.model_fields and name not in UNSERVED:
            # Of thousands the first is told, and no list of them all is made.
            raise _unknown(name, SamplingParams)
        named[name] = setting
    # A JSON null is a parameter left out, but for those where None has a meaning of its own.
    named = {name: item for name, item in named.items() if item is not None or name == "max_tokens"}
    for name, item in named.items():
        if name in UNSERVED:
            raise RequestError(ErrorCode.UNSUPPORTED, refusal(name))
        if isinstance(item, bool) and name in _NUMBERS:
            raise RequestError(ErrorCode.INVALID_VALUE, f"{name} takes a number, not {str(item).lower()}")
    try:
        return SamplingParams.model_validate(named)
    except ValidationError as error:
        raise _refusal(error, "", SamplingParams) from error


_NUMBERS = frozenset(
    name
    for name, field in SamplingParams.model_fields.items()
    if field.annotation in (int, float, int | None, float | None)
)


def _refusal(error: ValidationError, where: str, model: type[BaseModel]) -> RequestError:
    first = error.errors(include_url=False, include_context=False)[0]
    prefix = f"{where}." if where else ""
    if first["type"] == "extra_forbidden":
        return _unknown(".".join(str(part) for part in first["loc"]), model, prefix)
    return RequestError(ErrorCode.INVALID_VALUE, prefix + explain(error))


def _unknown(name: str, model: type[BaseModel], prefix: str = "") -> RequestError:
    shown = name[:MAX_ID_LENGTH]
    hint = closest(shown, model.model_fields)
    return RequestError(ErrorCode.UNKNOWN_PARAMETER, f"{prefix}{shown} is not a parameter of this service.{hint}")


def _header(folded: Mapping[str, Any], name: str) -> str | None:
    value = folded.get(name)
    if value is None or value == "":
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)


def _identity(folded: Mapping[str, Any], request_id: str) -> str:
    identity = _header(folded, "x-request-id") or _header(folded, "id") or request_id
    if len(identity) > MAX_ID_LENGTH:
        raise RequestError(
            ErrorCode.INVALID_VALUE,
            f"the request id has {len(identity)} characters, the limit is {MAX_ID_LENGTH}; shorten it",
        )
    return identity


def _sticky(folded: Mapping[str, Any], keys: Sequence[str]) -> str | None:
    """`kind:value` of the first sticky key that was sent; `user` is also read from the header X-User."""
    for key in keys:
        name = key.lower()
        value = _header(folded, name) or (_header(folded, "x-user") if name == USER_PARAMETER else None)
        if value is not None:
            return f"{name}:{value}"
    return None


def _pin(folded: Mapping[str, Any]) -> int | None:
    value = folded.get(PIN_PARAMETER)
    if value is None or value == "":
        return None
    text = str(value)
    if isinstance(value, bool) or not text.isascii() or not text.isdigit() or not 0 < int(text[:19]) < 10**18:
        raise RequestError(
            ErrorCode.INVALID_VALUE, f"version takes the number of a version, such as 2 (got {text[:40]!r})"
        )
    return int(text)
