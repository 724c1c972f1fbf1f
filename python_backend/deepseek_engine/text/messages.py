"""The `messages` of a chat request, checked and brought into the one form that chat templates expect."""

from typing import Any

from piccard_contract.errors import ErrorCode, RequestError

ROLES = ("system", "user", "assistant", "tool")


def normalize_messages(messages: Any) -> list[dict[str, Any]]:
    """Check messages and join text parts; the input is left as it is.

    Content becomes one string (parts are joined with newlines, as vLLM does), or None where an assistant only calls
    tools. An empty `tool_calls` is dropped: templates ask whether the key is there. Other keys are passed on.

    Raises:
        RequestError: INVALID_JSON for another shape than a list of objects, MISSING_INPUT for an empty list,
            INVALID_VALUE for a bad role or content, UNSUPPORTED for parts that are not text.
    """
    if not isinstance(messages, list):
        raise RequestError(ErrorCode.INVALID_JSON, f"messages is {_kind(messages)}; send a list of message objects.")
    if not messages:
        raise RequestError(ErrorCode.MISSING_INPUT, "messages is empty; send at least one message.")
    return [_normalize(message, f"messages[{position}]") for position, message in enumerate(messages)]


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _normalize(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RequestError(
            ErrorCode.INVALID_JSON, f"{where} is {_kind(message)}; send an object with role and content."
        )
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(ErrorCode.INVALID_VALUE, f"{where}.role is {role!r}; use one of {', '.join(ROLES)}.")
    normal = {**message, "content": _content(message.get("content"), f"{where}.content")}
    calls = _tool_calls(normal.pop("tool_calls", None), where)
    if calls and role != "assistant":
        raise RequestError(ErrorCode.INVALID_VALUE, f"{where} has tool_calls; only the assistant calls tools.")
    if calls:
        normal["tool_calls"] = calls
    elif normal["content"] is None:
        raise RequestError(
            ErrorCode.INVALID_VALUE, f"{where}.content is missing; send a string or a list of text parts."
        )
    return normal


def _content(content: Any, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(
            ErrorCode.INVALID_VALUE, f"{where} is {_kind(content)}; send a string or a list of text parts."
        )
    return "\n".join(_text_part(part, f"{where}[{position}]") for position, part in enumerate(content))


def _text_part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise RequestError(ErrorCode.INVALID_VALUE, f"{where} is {_kind(part)}; send an object with type and text.")
    if part.get("type") != "text":
        raise RequestError(
            ErrorCode.UNSUPPORTED, f"{where} has type {part.get('type')!r}; the models read text parts only."
        )
    if not isinstance(part.get("text"), str):
        raise RequestError(ErrorCode.INVALID_VALUE, f"{where}.text is {_kind(part.get('text'))}; send a string.")
    return part["text"]


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not calls and calls in (None, []):
        return []
    if not isinstance(calls, list) or not all(_is_tool_call(call) for call in calls):
        raise RequestError(
            ErrorCode.INVALID_VALUE,
            f"{where}.tool_calls has to be a list of objects, each with a function that has name and arguments.",
        )
    return calls


def _is_tool_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments"), str | dict)
    )
