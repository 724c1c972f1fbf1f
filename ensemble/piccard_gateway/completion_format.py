"""Answers of /v1/completions, whole and as events."""

from collections.abc import Iterator, Sequence
from typing import Any

from piccard_contract.response import Choice, Response

from piccard_gateway.events import compact, event, text_json
from piccard_gateway.logprobs import CompletionLogprobs


class CompletionFormat:
    """Writes the answer of one request. Choices are numbered over all prompts, those of the first prompt first.

    Args:
        id, created, model: told in every event.
        top: alternatives that are told of each token; None tells no log-probabilities.
        usage: whether the last event of a stream holds the usage.
        choices: of each prompt.
        echoes: the texts that stand before the answers, one a prompt; none where nothing is repeated.
    """

    def __init__(
        self,
        id: str,
        created: int,
        model: str,
        *,
        top: int | None,
        usage: bool,
        choices: int,
        echoes: Sequence[str] = (),
    ) -> None:
        self._fields = {"id": id, "created": created, "model": model}
        self._top = top
        self._choices = choices
        self._echoes = dict(enumerate(echoes))
        head = compact({"id": id, "object": "text_completion", "created": created, "model": model})[:-1]
        told = ',"usage":null' if usage else ""
        self._head = f'data: {head}{told},"choices":[{{"index":'
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._echoed: set[int] = set()

    def events(self, prompt: int, response: Response) -> Iterator[bytes]:
        """Events that tell a response, one a choice that has something new."""
        for number, choice in enumerate(response.choices):
            index = prompt * self._choices + number
            if choice.text or choice.logprobs or (response.prompt_logprobs and index not in self._echoed):
                text = self._with_echo(prompt, index, choice)
                logprobs = compact(self._told(prompt, index, response, choice)) if self._top is not None else "null"
                yield self._event(index, text_json(text), logprobs)

    def ends(self, prompt: int, last: Response) -> Iterator[bytes]:
        """Events that tell why each choice ended."""
        for number, choice in enumerate(last.choices):
            index = prompt * self._choices + number
            # A text that stayed empty has its prompt before it all the same.
            text = self._with_echo(prompt, index, Choice())
            yield self._event(index, text_json(text), "null", text_json(choice.finish_reason or "stop"))

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        """The event with the usage and no choice."""
        return event({**self._fields, "object": "text_completion", "choices": [], "usage": usage})

    def whole(self, responses: list[Response], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer without stream."""
        choices = [
            self._choice(prompt, number, response)
            for prompt, response in enumerate(responses)
            for number in range(len(response.choices))
        ]
        return {**self._fields, "object": "text_completion", "choices": choices, "usage": usage}

    def _choice(self, prompt: int, number: int, response: Response) -> dict[str, Any]:
        index, choice = prompt * self._choices + number, response.choices[number]
        # The echo of the log-probabilities goes by that of the text, so it comes first.
        logprobs = None if self._top is None else self._told(prompt, index, response, choice)
        text = self._with_echo(prompt, index, choice)
        finish = choice.finish_reason or "stop"
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _with_echo(self, prompt: int, index: int, choice: Choice) -> str:
        if index in self._echoed or prompt not in self._echoes:
            return choice.text
        self._echoed.add(index)
        return self._echoes[prompt] + choice.text

    def _told(self, prompt: int, index: int, response: Response, choice: Choice) -> dict[str, Any]:
        logprobs = self._logprobs.get(index)
        positions: list[Any] = list(choice.logprobs or [])
        if logprobs is not None or prompt not in self._echoes:
            return self._logprobs.setdefault(index, CompletionLogprobs(self._top or 0)).of(positions)
        logprobs = self._logprobs[index] = CompletionLogprobs(self._top or 0)
        asked = response.prompt_logprobs or []
        return logprobs.of([*asked, *positions], _first_text(self._echoes[prompt], asked))

    def _event(self, index: int, text: str, logprobs: str, finish: str = "null") -> bytes:
        return f'{self._head}{index},"text":{text},"logprobs":{logprobs},"finish_reason":{finish}}}]}}\n\n'.encode()


def _first_text(prompt: str, positions: Sequence[Any]) -> str:
    """The text of a prompt's first token, of which no log-probability is known: what the others leave.

    A bos token that the version puts before a prompt has no text there.
    """
    others = sum(len(next(iter(position.values()))["decoded_token"]) for position in positions if position)
    return prompt[: max(0, len(prompt) - others)]
