"""Runs the generations of one request and writes their answer, whole or as events."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any, Protocol

from piccard_contract.errors import RequestError
from piccard_contract.response import Response, Usage
from starlette.types import Send

from piccard_gateway.answer import Answer, Headers, send_error, send_events, send_json
from piccard_gateway.errors import api_error
from piccard_gateway.events import DONE
from piccard_gateway.generator import Generation, Generator
from piccard_gateway.merged import merged
from piccard_gateway.usage import usage_of


class Format(Protocol):
    """How an endpoint tells responses; the number is that of the prompt."""

    def events(self, prompt: int, response: Response) -> Iterator[bytes]: ...

    def ends(self, prompt: int, last: Response) -> Iterator[bytes]: ...

    def usage_event(self, usage: dict[str, Any]) -> bytes: ...

    def whole(self, responses: list[Response], usage: dict[str, Any]) -> dict[str, Any]: ...


class CompletionRun:
    """One request of a client.

    Args:
        generator: what generates.
        asked: its generations, one a prompt.
        format: how the endpoint tells them.
        request_id: told in every answer.
        usage: whether a stream ends with the usage.
    """

    def __init__(
        self, generator: Generator, asked: list[Generation], format: Format, *, request_id: str, usage: bool = False
    ) -> None:
        self._generator = generator
        self._asked = asked
        self._format = format
        self._usage = usage
        self._headers: Headers = [(b"x-request-id", request_id.encode())]
        self._served: dict[bytes, bytes] = {}
        self._routed = False
        self._counts = [Usage() for _ in asked]

    def answer(self, *, stream: bool) -> Answer:
        """The response of the route."""
        return Answer(self._stream if stream else self._whole)

    async def _stream(self, send: Send) -> None:
        try:
            await send_events(send, self._events(), lambda: self._headers)
        except RequestError as error:
            await send_error(send, api_error(error), self._headers)

    async def _whole(self, send: Send) -> None:
        found: dict[int, Response] = {}
        try:
            async with aclosing(self._responses()) as responses:
                async for prompt, response in responses:
                    if prompt in found:
                        found[prompt].extend(response)
                    else:
                        found[prompt] = response
        except RequestError as error:
            await send_error(send, api_error(error), self._headers)
            return
        told = [found[prompt] for prompt in range(len(self._asked))]
        await send_json(send, 200, self._format.whole(told, usage_of(self._counts)), self._headers)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """Events as bytes; those of one response come together, since each piece that is sent costs."""
        async with aclosing(self._responses()) as responses:
            async for prompt, response in responses:
                events = list(self._format.events(prompt, response)) if _tells(response) else []
                if response.finished:
                    events += self._format.ends(prompt, response)
                if events:
                    yield b"".join(events)
        last = [self._format.usage_event(usage_of(self._counts))] if self._usage else []
        yield b"".join([*last, DONE])

    async def _responses(self) -> AsyncGenerator[tuple[int, Response], None]:
        sources = [self._generator.generate(asked) for asked in self._asked]
        async with aclosing(merged(sources)) as responses:
            async for prompt, response in responses:
                if not self._routed:
                    self._route(response)
                if response.finished:
                    self._counts[prompt] = response.usage
                yield prompt, response

    def _route(self, response: Response) -> None:
        """Note who serves; until there is something to tell, another version may take over unseen."""
        if response.served_version is not None:
            self._served[b"x-served-version"] = str(response.served_version).encode()
        if response.route_reason is not None:
            self._served[b"x-route-reason"] = response.route_reason.encode()
        if _tells(response) or response.finished:
            self._routed = True
            self._headers += self._served.items()


def _tells(response: Response) -> bool:
    return response.has_text or bool(response.prompt_logprobs) or any(choice.logprobs for choice in response.choices)
