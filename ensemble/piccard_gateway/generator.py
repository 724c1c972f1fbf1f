"""What the routes ask of whatever generates: the ensembles in a server, a double in tests."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Protocol

from piccard_contract.response import Response


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation to ask for; exactly one of text, messages and input_ids is set.

    Attributes:
        service: whose ensemble is asked.
        sampling: names and values of the sampling parameters, defaults left out.
        extensions: keys of the input `extensions`.
        parameters: request parameters: the headers that the router goes by, names in lower case, and such as the pin
            `version`.
        first_token: seconds within which a token has to come.
        between_tokens: seconds that may pass between two responses after it.
        size: about how many bytes of text the prompt has.
    """

    service: str
    text: str | None = None
    messages: list[Any] | None = None
    input_ids: list[int] | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    extensions: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, str | int] = field(default_factory=dict)
    first_token: float = 600.0
    between_tokens: float = 600.0
    size: int = 0

    @property
    def wants_logprobs(self) -> bool:
        return "logprobs" in self.sampling


class Generator(Protocol):
    """Generates. Whoever does not read to the end closes the iterator, which cancels the generation."""

    def generate(self, asked: Generation) -> AsyncGenerator[Response, None]:
        """Responses until the last, which has the usage; those before the first token may be empty.

        Raises:
            RequestError: why the request failed, before or after its first token.
        """

    async def live(self) -> bool:
        """Whether whatever generates can be reached at all."""
