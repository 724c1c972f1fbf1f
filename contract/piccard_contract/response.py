"""A response as data: what a version sends, what the router merges, what a client gets."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from piccard_contract.errors import ErrorCode, RequestError


@dataclass(slots=True)
class Choice:
    """New output of one choice.

    Attributes:
        text: new text.
        token_ids: new tokens; what is held back (half a character) has tokens here before it has text.
        finish_reason: None while it runs, else stop, length or abort.
        cumulative_logprob: of all its tokens so far.
        logprobs: one object a new token, {id: {logprob, rank, decoded_token}}; None where not asked for.
        reasoning: new text within <think>, where it was asked for apart.
        stop_reason: the stop string or token id that ended it.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[dict[str, Any]] | None = None
    reasoning: str = ""
    stop_reason: int | str | None = None

    def extend(self, later: "Choice") -> None:
        """Take what came after."""
        self.text += later.text
        self.reasoning += later.reasoning
        self.token_ids.extend(later.token_ids)
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
        if later.cumulative_logprob is not None:
            self.cumulative_logprob = later.cumulative_logprob
        if later.finish_reason is not None:
            self.finish_reason = later.finish_reason
            self.stop_reason = later.stop_reason


@dataclass(slots=True)
class Usage:
    """Tokens of a request; completion counts those that were resumed from too."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(slots=True)
class Response:
    """What came since the last response.

    Attributes:
        choices: one a choice, all of them in every response.
        usage: totals so far.
        error: why the request failed; the last response of a failed request.
        details: further keys of the output `details`.
    """

    choices: list[Choice] = field(default_factory=lambda: [Choice()])
    usage: Usage = field(default_factory=Usage)
    served_version: int | None = None
    route_reason: str | None = None
    cancel_token: str | None = None
    error: RequestError | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finish_reason is not None for choice in self.choices)

    @property
    def has_tokens(self) -> bool:
        return any(choice.token_ids for choice in self.choices)

    @property
    def has_text(self) -> bool:
        """Whether there is anything to show: of half a character there are tokens and no text yet."""
        return any(choice.text or choice.reasoning for choice in self.choices)

    def extend(self, later: "Response") -> None:
        """Take what came after, so that one response tells both."""
        for choice, more in zip(self.choices, later.choices, strict=True):
            choice.extend(more)
        self.usage = later.usage
        self.error = later.error or self.error
        self.served_version = later.served_version if later.served_version is not None else self.served_version
        self.route_reason = later.route_reason or self.route_reason
        self.cancel_token = later.cancel_token or self.cancel_token
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        self.details.update(later.details)


def response_outputs(response: Response, returns: frozenset[str], *, final: bool) -> dict[str, list[Any]]:
    """The tensors of a response, name -> values (BYTES as str).

    Args:
        returns: the optional outputs that the request asked for.
        final: whether it is the request's last, which carries status and usage.
    """
    choices = response.choices
    outputs: dict[str, list[Any]] = {
        "text_output": [choice.text for choice in choices],
        "token_ids": [token for choice in choices for token in choice.token_ids],
    }
    if "finish_reason" in returns:
        outputs["finish_reason"] = [str(choice.finish_reason) for choice in choices]
    if "cumulative_logprob" in returns:
        outputs["cumulative_logprob"] = [
            float("nan") if choice.cumulative_logprob is None else choice.cumulative_logprob for choice in choices
        ]
    if "logprobs" in returns:
        outputs["logprobs"] = [json.dumps(choice.logprobs) for choice in choices]
    if "num_input_tokens" in returns:
        outputs["num_input_tokens"] = [response.usage.prompt_tokens]
    if "num_output_tokens" in returns:
        outputs["num_output_tokens"] = [len(choice.token_ids) for choice in choices]
    if response.served_version is not None:
        outputs["served_version"] = [response.served_version]
    if response.route_reason is not None:
        outputs["route_reason"] = [response.route_reason]
    if response.cancel_token is not None:
        outputs["cancel_token"] = [response.cancel_token]
    if final or response.error is not None:
        outputs["status"] = [json.dumps(status_of(response.error))]
    details = _details(response, final=final)
    if details:
        outputs["details"] = [json.dumps(details, ensure_ascii=False)]
    return outputs


def status_of(error: RequestError | None) -> dict[str, Any]:
    """The JSON of the output status."""
    if error is None:
        return {"code": "OK"}
    return {"code": error.code.value, "message": error.message, "retry_after": error.retry_after}


def parse_response(outputs: Mapping[str, Sequence[Any]]) -> Response:
    """Read a version's response: the inverse of `response_outputs`, as the router needs it.

    Raises:
        ValueError: the tensors are not those of a version of this contract.
    """
    texts = [_text(value) for value in outputs.get("text_output", ())]
    details: dict[str, Any] = json.loads(_text(outputs["details"][0])) if "details" in outputs else {}
    token_ids = [int(token) for token in outputs.get("token_ids", ())]
    counts = details.pop("token_counts", None) or [len(token_ids)]
    reasons = details.pop("finish_reasons", [None] * len(texts))
    if "finish_reason" in outputs:
        reasons = [None if _text(value) == "None" else _text(value) for value in outputs["finish_reason"]]
    reasoning = details.pop("reasoning", [""] * len(texts))
    stop_reasons = details.pop("stop_reasons", [None] * len(texts))
    sums = outputs.get("cumulative_logprob", [None] * len(texts))
    logprobs = [json.loads(_text(value)) for value in outputs["logprobs"]] if "logprobs" in outputs else None
    choices, start = [], 0
    for index, text in enumerate(texts):
        count = counts[index]
        choices.append(
            Choice(
                text=text,
                token_ids=token_ids[start : start + count],
                finish_reason=reasons[index],
                cumulative_logprob=_known(sums[index]),
                logprobs=None if logprobs is None else logprobs[index],
                reasoning=reasoning[index],
                stop_reason=stop_reasons[index],
            )
        )
        start += count
    return Response(
        choices=choices or [Choice()],
        usage=_usage(details.pop("usage", {"prompt_tokens": int(_first(outputs, "num_input_tokens") or 0)})),
        served_version=None if _first(outputs, "served_version") is None else int(_first(outputs, "served_version")),
        route_reason=_first_text(outputs, "route_reason"),
        cancel_token=_first_text(outputs, "cancel_token"),
        error=_error(outputs),
        prompt_logprobs=details.pop("prompt_logprobs", None),
        details=details,
    )


def _details(response: Response, *, final: bool) -> dict[str, Any]:
    details = dict(response.details)
    if len(response.choices) > 1:
        details["token_counts"] = [len(choice.token_ids) for choice in response.choices]
    if any(choice.reasoning for choice in response.choices):
        details["reasoning"] = [choice.reasoning for choice in response.choices]
    if any(choice.stop_reason is not None for choice in response.choices):
        details["stop_reasons"] = [choice.stop_reason for choice in response.choices]
    if response.prompt_logprobs is not None:
        details["prompt_logprobs"] = response.prompt_logprobs
    if final:
        if any(choice.finish_reason for choice in response.choices):
            details["finish_reasons"] = [choice.finish_reason for choice in response.choices]
        usage = response.usage
        details["usage"] = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
        }
    return details


def _error(outputs: Mapping[str, Sequence[Any]]) -> RequestError | None:
    if "status" not in outputs:
        return None
    status = json.loads(_text(outputs["status"][0]))
    if status["code"] == "OK":
        return None
    # A version may be newer than its router, and know failures that this one does not.
    code = ErrorCode(status["code"]) if status["code"] in list(ErrorCode) else ErrorCode.INTERNAL
    return RequestError(code, status["message"], retry_after=status.get("retry_after"))


def _usage(counts: Mapping[str, int]) -> Usage:
    """The counts that are known here; a newer version may tell more."""
    return Usage(**{part.name: counts[part.name] for part in fields(Usage) if part.name in counts})


def _known(value: Any) -> float | None:
    """A number, or None for the NaN that stands for none."""
    return None if value is None or math.isnan(value) else float(value)


def _first(outputs: Mapping[str, Sequence[Any]], name: str) -> Any:
    return outputs[name][0] if name in outputs else None


def _first_text(outputs: Mapping[str, Sequence[Any]], name: str) -> str | None:
    return _text(outputs[name][0]) if name in outputs else None


def _text(value: Any) -> str:
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)
