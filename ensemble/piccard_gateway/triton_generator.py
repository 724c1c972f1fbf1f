"""Generates with the ensembles of a tritonserver, one gRPC stream a request at a time.

A stream serves one request after the other: to open one costs more than all else that the gateway does before the
first token. Requests do not share one at once, since a client that reads slowly would hold up the others.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import grpc
from piccard_contract.errors import ErrorCode, RequestError, parse_error
from piccard_contract.response import Response
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from piccard_gateway.frames import cancel_of, is_final, request_of, response_of
from piccard_gateway.generator import Generation
from piccard_gateway.kept_calls import KeptCalls

_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]

# Seconds in which a request that nobody waits for any more has to tell its cancel token, and a cancel its answer.
_CANCEL_TIMEOUT = 60.0

# Seconds that those which run get when the gateway ends, which must not wait for long.
_LAST_CANCELS = 2.0

RETRY_AFTER = 1.0


class TritonGenerator:
    """Asks the server at `address` (host:port of its gRPC)."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._calls = KeptCalls(self._stub.ModelStreamInfer)
        self._cancels: set[asyncio.Task[None]] = set()

    async def generate(self, asked: Generation) -> AsyncGenerator[Response, None]:
        """See `Generator.generate`."""
        call, answered = self._calls.take(), False
        stream = _Stream(call)
        try:
            await call.write(request_of(asked))
            clock = asyncio.get_running_loop().time
            until, waiting = clock() + asked.first_token, True
            while not stream.over:
                response = await stream.read(until - clock() if waiting else asked.between_tokens)
                if response.error is not None:
                    raise response.error
                waiting = waiting and not response.has_text
                answered = stream.over
                yield response
        except grpc.RpcError as error:
            stream.over = True
            raise _unreachable(error) from error
        finally:
            if answered:
                self._calls.give_back(call)
            elif stream.over:
                stream.close()
            else:
                self._abandon(stream, asked.service)

    async def live(self) -> bool:
        try:
            answer = await self._stub.ServerLive(pb.ServerLiveRequest(), timeout=5.0)
        except grpc.RpcError:
            return False
        return bool(answer.live)

    async def close(self) -> None:
        """Wait until what was abandoned is cancelled, and close the connection."""
        if self._cancels:
            await asyncio.wait(self._cancels, timeout=_LAST_CANCELS)
        self._calls.close()
        await self._channel.close()

    def _abandon(self, stream: "_Stream", service: str) -> None:
        task = asyncio.create_task(self._cancel(stream, service))
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)

    async def _cancel(self, stream: "_Stream", service: str) -> None:
        """Through an ensemble nobody sees a stream being closed, so the generation is ended by its token."""
        with suppress(grpc.RpcError, RequestError, TimeoutError, asyncio.CancelledError):
            async with asyncio.timeout(_CANCEL_TIMEOUT):
                token = await stream.find_token()
                if token is not None:
                    await self._stub.ModelInfer(cancel_of(service, token))
        stream.close()


class _Stream:
    """One call and what was read of it."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._token: str | None = None
        self._reading: asyncio.Future[Any] | None = None
        self.over = False

    async def read(self, seconds: float) -> Response:
        """The next response.

        Raises:
            RequestError: DEADLINE_EXCEEDED after `seconds`; whatever the server refuses.
        """
        try:
            async with asyncio.timeout(seconds):
                message = await (self._first() if self._token is None else self._call.read())
        except TimeoutError:
            sentence = f"nothing came for {seconds:.3g} s; send the request again, or a shorter one"
            raise RequestError(ErrorCode.DEADLINE_EXCEEDED, sentence, retry_after=RETRY_AFTER) from None
        return self._take(message)

    async def find_token(self) -> str | None:
        """The token that cancels the call, which may not have come yet; None where the call is over."""
        while self._token is None and not self.over:
            self._take(await self._first())
        return None if self.over else self._token

    def close(self) -> None:
        self._call.cancel()

    async def _first(self) -> Any:
        # A read that is cancelled cancels the call, of which only the token would be missing.
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._call.read())
        message = await asyncio.shield(self._reading)
        self._reading = None
        return message

    def _take(self, message: Any) -> Response:
        if message is grpc.aio.EOF:
            self.over = True
            raise RequestError(ErrorCode.UNAVAILABLE, "the server ended the stream", retry_after=RETRY_AFTER)
        if message.error_message:
            self.over = True
            raise _refusal(message.error_message)
        response = response_of(message.infer_response)
        self._token = response.cancel_token or self._token
        self.over = is_final(message.infer_response)
        return response


def _refusal(text: str) -> RequestError:
    """What the router said, or Triton itself where it has no head."""
    found = parse_error(text)
    if found is not None:
        return found
    if "unknown model" in text or "is not found" in text:
        return RequestError(ErrorCode.UNAVAILABLE, "the service is not loaded", retry_after=RETRY_AFTER)
    return RequestError(ErrorCode.UNAVAILABLE, f"the server did not answer: {text}", retry_after=RETRY_AFTER)


def _unreachable(error: grpc.RpcError) -> RequestError:
    if error.code() == grpc.StatusCode.UNAVAILABLE:
        return RequestError(ErrorCode.UNAVAILABLE, "the server cannot be reached", retry_after=RETRY_AFTER)
    return RequestError(ErrorCode.INTERNAL, f"the server refused the call ({error.code().name}): {error.details()}")
