"""Answers of /v1/chat/completions, whole and as events."""

from collections.abc import Iterator
from typing import Any

from piccard_contract.response import Choice, Response

from piccard_gateway.events import compact, event, text_json
from piccard_gateway.logprobs import chat_logprobs


class ChatFormat:
    """Writes the answer of one chat.

    Args:
        id, created, model: told in every event.
        top: alternatives that are told of each token; None tells no log-probabilities.
        usage: whether the last event of a stream holds the usage.
    """

    def __init__(self, id: str, created: int, model: str, *, top: int | None, usage: bool) -> None:
        self._fields = {"id": id, "created": created, "model": model}
        self._top = top
        head = compact({"id": id, "object": "chat.completion.chunk", "created": created, "model": model})[:-1]
        told = ',"usage":null' if usage else ""
        self._head = f'data: {head}{told},"choices":[{{"index":'
        self._opened: set[int] = set()

    def events(self, _: int, response: Response) -> Iterator[bytes]:
        """Events that tell a response, one a choice that has something new."""
        for index, choice in enumerate(response.choices):
            if index not in self._opened:
                self._opened.add(index)
                yield self._event(index, '{"role":"assistant","content":""}', "null")
            if choice.text or choice.reasoning or choice.logprobs:
                yield self._event(index, self._delta(choice), self._logprobs(choice))

    def ends(self, _: int, last: Response) -> Iterator[bytes]:
        """Events that tell why each choice ended."""
        for index, choice in enumerate(last.choices):
            yield self._event(index, "{}", "null", text_json(choice.finish_reason or "stop"))

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        """The event with the usage and no choice."""
        return event({**self._fields, "object": "chat.completion.chunk", "choices": [], "usage": usage})

    def whole(self, responses: list[Response], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer without stream."""
        choices = [self._choice(index, choice) for index, choice in enumerate(responses[0].choices)]
        return {**self._fields, "object": "chat.completion", "choices": choices, "usage": usage}

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        logprobs = None
        if self._top is not None:
            logprobs = {"content": chat_logprobs(choice.logprobs or [], self._top), "refusal": None}
        finish = choice.finish_reason or "stop"
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}

    def _delta(self, choice: Choice) -> str:
        if not choice.reasoning:
            return f'{{"content":{text_json(choice.text)}}}'
        content = f',"content":{text_json(choice.text)}' if choice.text else ""
        return f'{{"reasoning_content":{text_json(choice.reasoning)}{content}}}'

    def _logprobs(self, choice: Choice) -> str:
        if self._top is None:
            return "null"
        return compact({"content": chat_logprobs(choice.logprobs or [], self._top), "refusal": None})

    def _event(self, index: int, delta: str, logprobs: str, finish: str = "null") -> bytes:
        return f'{self._head}{index},"delta":{delta},"logprobs":{logprobs},"finish_reason":{finish}}}]}}\n\n'.encode()
