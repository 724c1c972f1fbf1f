"""What every request passes before a route sees it: limits, then the key. Pure ASGI, since a stream passes it too."""

import asyncio
import logging
from collections.abc import Callable

from piccard_contract.gateway_file import GatewayLimits
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from piccard_gateway.answer import send_error
from piccard_gateway.caller import put_caller
from piccard_gateway.errors import ApiError
from piccard_gateway.key_ring import KeyRing

_log = logging.getLogger(__name__)

# Probes carry no keys.
OPEN_PATHS = frozenset({"/health"})


class Door:
    """Lets requests through to `app`.

    Args:
        limits: those of now.
        keys: who may come in.
    """

    def __init__(self, app: ASGIApp, limits: Callable[[], GatewayLimits], keys: KeyRing) -> None:
        self._app = app
        self._limits = limits
        self._keys = keys
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            inner = await self._admit(scope, receive)
        except ApiError as error:
            # What is left of the body is not read, so the connection ends here.
            await send_error(send, error, [(b"connection", b"close")])
            return
        self._running += 1
        try:
            await self._app(scope, inner, send)
        finally:
            self._running -= 1

    async def _admit(self, scope: Scope, receive: Receive) -> Receive:
        """Check a request and read its body; returns what gives the app the body again."""
        limits = self._limits()
        if sum(len(name) + len(value) for name, value in scope["headers"]) > limits.header_bytes:
            raise ApiError(431, "headers_too_large", f"headers take {limits.header_bytes} bytes; shorten them")
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if scope["path"] not in OPEN_PATHS:
            put_caller(scope, self._keys.caller(headers.get(b"authorization")))
            if self._running >= limits.requests:
                sentence = f"{limits.requests} requests are running, which is the limit; retry later"
                raise ApiError(429, "overloaded", sentence, retry_after=1.0)
        declared = headers.get(b"content-length", "")
        if declared.isdigit() and int(declared[:19]) > limits.body_bytes:
            raise _too_large(limits)
        try:
            async with asyncio.timeout(limits.read_seconds):
                body = await _read(receive, limits)
        except TimeoutError:
            sentence = f"the body did not arrive within {limits.read_seconds:g} s; send it faster"
            raise ApiError(408, "request_timeout", sentence) from None
        return _again(body, receive)


async def _read(receive: Receive, limits: GatewayLimits) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(499, "cancelled", "the client went away")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limits.body_bytes:
            raise _too_large(limits)
        if not message.get("more_body", False):
            return b"".join(parts)


def _again(body: bytes, receive: Receive) -> Receive:
    given = False

    async def inner() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return inner


def _too_large(limits: GatewayLimits) -> ApiError:
    return ApiError(413, "request_too_large", f"the body has more than {limits.body_bytes} bytes; shorten it")
