"""What the router needs of the world: versions to call, a client to answer. Tests stand in for both."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from piccard_contract.errors import RequestError
from piccard_contract.request import GenerateRequest
from piccard_contract.response import Response
from piccard_contract.routing import RouteReason


@dataclass(frozen=True, slots=True)
class Stamp:
    """What the router adds to every response of an attempt."""

    version: int
    reason: RouteReason
    cancel_token: str


class Frame(Protocol):
    """One response of a version as it came, not yet read."""

    @property
    def plain(self) -> bool:
        """Whether it holds new tokens and nothing else: neither a status nor a failure of Triton."""
        ...

    def token_ids(self) -> list[int]:
        """Its new tokens."""
        ...

    def cumulative_logprob(self) -> float | None:
        """Of the first choice, where it was asked for."""
        ...

    def read(self) -> Response:
        """All of it.

        Raises:
            RequestError: Triton failed the request, or it is no response of a version.
        """
        ...


class VersionClient(Protocol):
    """Calls versions. Every method blocks its thread, for ever where the version hangs."""

    def open(self, version: int, request: GenerateRequest, outputs: frozenset[str]) -> Iterator[Frame]:
        """The responses of `version` to `request`, of which only the named outputs are sent.

        Raises:
            RequestError: the version cannot be called.
        """
        ...

    def cancel(self, version: int, token: str) -> bool:
        """End the generation that holds `token`; whether there was one."""
        ...


class Sender(Protocol):
    """Answers one request of a client. It is used by one thread at a time.

    Attributes:
        returns: the optional outputs that the client asked for.
    """

    returns: frozenset[str]

    @property
    def ended(self) -> bool:
        """Whether the last response was sent."""
        ...

    def forward(self, frame: Frame, stamp: Stamp) -> None:
        """Pass a version's response on as it is, with the stamp."""
        ...

    def send(self, response: Response, *, final: bool) -> None:
        """Send a response; `final` ends the request in the same send."""
        ...

    def fail(self, error: RequestError) -> None:
        """End the request with an error."""
        ...
