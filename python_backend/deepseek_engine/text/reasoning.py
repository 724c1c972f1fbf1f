"""Splits the output of reasoning models (R1 and its distills) into reasoning and answer."""

from enum import Enum, auto
from typing import NamedTuple

START_TAG = "<think>"
END_TAG = "</think>"


class ReasoningDelta(NamedTuple):
    """Text that was added to each part."""

    reasoning: str = ""
    answer: str = ""


class _Part(Enum):
    START = auto()
    REASONING = auto()
    ANSWER_START = auto()
    ANSWER = auto()


def _begun_tag(text: str, tag: str) -> int:
    """Length of the longest ending of `text` that is a proper beginning of `tag`."""
    lengths = range(min(len(tag) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(tag[:length])), 0)


class ReasoningParser:
    """Splits a stream of text at `<think>` and `</think>`, wherever pushes cut it.

    Reasoning is what follows a `<think>` that opens the output (after white space at most) or ends the prompt, up to
    the first `</think>`; newlines next to the tags belong to neither part. An output that opens otherwise is all
    answer, so models that do not reason pass through unchanged, and so does a tag within an answer.

    Args:
        in_reasoning: whether the prompt already holds `<think>`, see `prompt_opens_reasoning`.
        seen: output text before the first push, whose parts were told already (a resumed stream).
    """

    def __init__(self, in_reasoning: bool = False, seen: str = "") -> None:
        self._part = _Part.REASONING if in_reasoning else _Part.START
        self._held = ""
        self._told_reasoning = False
        self.push(seen)

    @staticmethod
    def prompt_opens_reasoning(prompt: str) -> bool:
        """Whether a rendered prompt ends in an open `<think>`, as R1's generation prompt does."""
        return prompt.rstrip().endswith(START_TAG)

    def push(self, text: str) -> ReasoningDelta:
        """Take text that follows; returns what it adds to each part. A tag that may have begun is held back."""
        text, self._held = self._held + text, ""
        reasoning = ""
        if self._part is _Part.START:
            text = self._open(text)
        if self._part is _Part.REASONING:
            reasoning, text = self._reason(text)
        if self._part is _Part.ANSWER_START:
            text = text.lstrip("\n")
            self._part = _Part.ANSWER if text else _Part.ANSWER_START
        return ReasoningDelta(reasoning, text)

    def flush(self) -> ReasoningDelta:
        """What was held back, when the output ends: a tag that stayed unfinished is ordinary text."""
        text, self._held = self._held, ""
        if self._part is _Part.REASONING:
            return ReasoningDelta(reasoning=text.strip("\n") if not self._told_reasoning else text.rstrip("\n"))
        return ReasoningDelta(answer=text)

    def _open(self, text: str) -> str:
        """Decide what the output opens with; returns the text after the decision, nothing while it is open."""
        body = text.lstrip()
        if body.startswith(START_TAG):
            self._part = _Part.REASONING
            return body[len(START_TAG) :]
        if START_TAG.startswith(body):
            self._held = text
            return ""
        self._part = _Part.ANSWER
        return text

    def _reason(self, text: str) -> tuple[str, str]:
        """Split text within the reasoning into reasoning to tell now and text after the end tag."""
        if not self._told_reasoning:
            text = text.lstrip("\n")
        reasoning, tag, after = text.partition(END_TAG)
        if tag:
            self._part = _Part.ANSWER_START
            return reasoning.rstrip("\n"), after
        # Newlines are held too: they are dropped if the end tag follows them.
        told = text[: len(text) - _begun_tag(text, END_TAG)].rstrip("\n")
        self._held = text[len(told) :]
        self._told_reasoning = self._told_reasoning or bool(told)
        return told, ""
