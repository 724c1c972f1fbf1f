"""A response that is written while its client is watched: where the client goes away, what writes it is cancelled."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any

from piccard_contract.errors import ErrorCode, RequestError
from starlette.responses import Response as HttpResponse
from starlette.types import Message, Receive, Scope, Send

from piccard_gateway.errors import ApiError, api_error
from piccard_gateway.events import compact, event

Headers = list[tuple[bytes, bytes]]
Write = Callable[[Send], Awaitable[None]]

_JSON: Headers = [(b"content-type", b"application/json")]
# A proxy must neither keep events nor wait for more of them.
_EVENTS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


# Of a stream that the end of the gateway cuts short, or of a request that it leaves without an answer.
_ENDED = ApiError(503, ErrorCode.UNAVAILABLE.lower(), "the service ends; send the request again", retry_after=1.0)

# Seconds that a client has to take that.
_LAST_WORD = 1.0


class Answer(HttpResponse):
    """Runs `write` as long as the client is there. Where the gateway ends before it is through, the client is told.

    Args:
        write: sends the whole response.
    """

    def __init__(self, write: Write) -> None:
        super().__init__()
        self._write = write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        told = _Told(send)
        work = asyncio.ensure_future(self._write(told))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            # Nobody else cancels a request than a server that ends and has waited for it long enough.
            await _stop(work)
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORD):
                    await told.break_off(_ENDED)
            return
        finally:
            gone.cancel()
            await _stop(work)
        if not work.cancelled():
            work.result()


class _Told:
    """Sends, and knows how far the response is."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._started = False
        self._complete = False

    async def __call__(self, message: Message) -> None:
        self._started = True
        self._complete = message["type"] == "http.response.body" and not message.get("more_body", False)
        await self._send(message)

    async def break_off(self, error: ApiError) -> None:
        """End the response with an error: as its status, or as the last event of a stream."""
        if self._complete:
            return
        if not self._started:
            await send_error(self, error, [])
            return
        await self({"type": "http.response.body", "body": event(error.body()), "more_body": True})
        await self({"type": "http.response.body", "body": b""})


async def _stop(work: "asyncio.Future[None]") -> None:
    if not work.done():
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_json(send: Send, status: int, body: Any, headers: Headers) -> None:
    """Send a whole JSON answer."""
    content = compact(body).encode()
    length = (b"content-length", str(len(content)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*_JSON, length, *headers]})
    await send({"type": "http.response.body", "body": content})


async def send_error(send: Send, error: ApiError, headers: Headers) -> None:
    """Send a failure that came before the first byte."""
    await send_json(send, error.status, error.body(), [*headers, *error.headers()])


async def send_events(send: Send, events: AsyncGenerator[bytes, None], headers: Callable[[], Headers]) -> None:
    """Send events as they come. A failure before the first is a status, a later one an event and the end.

    Args:
        headers: asked once the first event is there.
    """
    begun = False
    try:
        async with aclosing(events):
            async for item in events:
                if not begun:
                    begun = True
                    await _start(send, headers())
                await send({"type": "http.response.body", "body": item, "more_body": True})
    except RequestError as error:
        if not begun:
            raise
        told = event(api_error(error).body())
        await send({"type": "http.response.body", "body": told, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _start(send: Send, headers: Headers) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [*_EVENTS, *headers]})
