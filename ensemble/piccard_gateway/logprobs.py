"""Log-probabilities in the two forms of OpenAI's API.

A position comes as {id: {logprob, rank, decoded_token}}, the chosen token first.
"""

from collections.abc import Iterable
from typing import Any

Position = dict[str, dict[str, Any]]


def chat_logprobs(positions: Iterable[Position], top: int) -> list[dict[str, Any]]:
    """`logprobs.content` of a chat: one entry a token, with its `top` most likely alternatives."""
    return [_chat_entry(position, top) for position in positions]


class CompletionLogprobs:
    """`logprobs` of a completion, whose offsets count on over the events of a stream.

    Args:
        top: alternatives that are told of each token.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._offset = 0

    def of(self, positions: Iterable[Position | None], first: str = "") -> dict[str, Any]:
        """The entries of tokens that follow.

        Args:
            positions: None for a token of which nothing is known: the first of a prompt, whose text is `first`.
        """
        told: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for position in positions:
            unknown: dict[str, Any] = {"decoded_token": first, "logprob": None}
            chosen = next(iter(position.values())) if position else unknown
            told["tokens"].append(chosen["decoded_token"])
            told["token_logprobs"].append(chosen["logprob"])
            told["top_logprobs"].append(self._tops(position) if position else None)
            told["text_offset"].append(self._offset)
            self._offset += len(chosen["decoded_token"])
        return told

    def _tops(self, position: Position) -> dict[str, float]:
        return {item["decoded_token"]: item["logprob"] for item in _most_likely(position, self._top)}


def _most_likely(position: Position, top: int) -> list[dict[str, Any]]:
    # The chosen token is there too, whatever its rank.
    return sorted(position.values(), key=lambda item: item["rank"])[:top]


def _chat_entry(position: Position, top: int) -> dict[str, Any]:
    alternatives = [_entry(item) for item in _most_likely(position, top)]
    return {**_entry(next(iter(position.values()))), "top_logprobs": alternatives}


def _entry(item: dict[str, Any]) -> dict[str, Any]:
    token = item["decoded_token"]
    return {"token": token, "logprob": item["logprob"], "bytes": list(token.encode())}
