"""How a client gets what versions send: as it comes, or whole at the end."""

from typing import Protocol

from piccard_contract.response import Response

from piccard_canary.protocols import Frame, Sender, Stamp


class Delivery(Protocol):
    """Takes responses towards a client.

    Attributes:
        passes: whether a version's response may be passed on unread.
        told: whether the client has been sent tokens, so that nothing can be taken back.
    """

    passes: bool
    told: bool

    def forward(self, frame: Frame, stamp: Stamp) -> None:
        """A response that needs no change; only where `passes`."""
        ...

    def deliver(self, response: Response, *, final: bool) -> None:
        """A response that was read."""
        ...

    def restart(self) -> None:
        """Forget what came; only where the client was not told."""
        ...


class Streamed:
    """Sends everything as it comes."""

    passes = True

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self.told = False

    def forward(self, frame: Frame, stamp: Stamp) -> None:
        self.told = True
        self._sender.forward(frame, stamp)

    def deliver(self, response: Response, *, final: bool) -> None:
        self.told = self.told or response.has_tokens
        self._sender.send(response, final=final)

    def restart(self) -> None:
        pass


class Whole:
    """Gathers everything and sends one response.

    Args:
        prompt: put before the text of every choice.
    """

    passes = False
    told = False

    def __init__(self, sender: Sender, prompt: str) -> None:
        self._sender = sender
        self._prompt = prompt
        self._gathered: Response | None = None

    def forward(self, frame: Frame, stamp: Stamp) -> None:
        raise AssertionError("what is gathered is read")

    def deliver(self, response: Response, *, final: bool) -> None:
        if self._gathered is None:
            self._gathered = response
        else:
            self._gathered.extend(response)
        if final:
            for choice in self._gathered.choices:
                choice.text = self._prompt + choice.text
            self._sender.send(self._gathered, final=True)

    def restart(self) -> None:
        self._gathered = None
