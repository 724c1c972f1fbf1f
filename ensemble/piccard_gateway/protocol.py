"""uvicorn's HTTP protocol with what it lacks: limits of a request's line and headers, and of the time they take."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from piccard_gateway.errors import ApiError
from piccard_gateway.events import compact


def bounded_protocol(header_bytes: int, read_seconds: float) -> type[HttpToolsProtocol]:
    """A protocol that ends connections whose line and headers are larger or come slower than that."""

    class BoundedProtocol(HttpToolsProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._in_headers = True
            self._header_bytes = 0
            self._overdue = self.loop.call_later(read_seconds, self._refuse, 408, "request_timeout", "be faster")

        def connection_lost(self, exc: Exception | None) -> None:
            self._overdue.cancel()
            super().connection_lost(exc)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._in_headers = True
            self._overdue.cancel()
            self._overdue = self.loop.call_later(read_seconds, self._refuse, 408, "request_timeout", "be faster")

        def on_headers_complete(self) -> None:
            self._in_headers = False
            self._header_bytes = 0
            self._overdue.cancel()
            super().on_headers_complete()

        def data_received(self, data: bytes) -> None:
            within = self._in_headers
            super().data_received(data)
            # The first of them may come with the body before, and the last of them is counted at the door.
            if within and self._in_headers:
                self._header_bytes += len(data)
                if self._header_bytes > header_bytes:
                    self._refuse(431, "headers_too_large", f"line and headers take {header_bytes} bytes; shorten them")

        def send_400_response(self, msg: str) -> None:
            self._refuse(400, "invalid_http", msg)

        def _refuse(self, status: int, code: str, sentence: str) -> None:
            if self.transport.is_closing():
                return
            body = compact(ApiError(status, code, sentence).body()).encode()
            head = f"HTTP/1.1 {status} Refused\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
            self.transport.close()

    return BoundedProtocol
