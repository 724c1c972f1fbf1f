"""Requests of the soak: normal ones on the ensemble and the gateway, and five kinds that no client should send.

Each says what came of it: `whole`, or the code that it was refused with, and everything else is a fault.
"""

import http.client
import json
import socket
import struct
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from callers import Call, GrpcStreamCaller, GrpcUnaryCaller, Told
from piccard_contract.errors import ErrorCode, parse_error

# Tokens of normal answers, in turn, and of one that is cancelled.
LENGTHS = (16, 24, 32, 48)
LONG = 2000

# Characters of a prompt that is far beyond the context, and bytes of a body that the gateway does not read.
OVER_LONG = 200_000
OVER_LARGE = 5 * 2**20

CONTROL = "".join(map(chr, range(32))) + "\x7f\x80\x9f\u200b\u202e\ufeff\ufffe\U000e0001"
BROKEN = b"def f\xff\xfe(\xc3\x28)\xed\xa0\x80:"

# Seconds that half a connection is left, far beyond none and within what the gateway gives a request to arrive.
HALF_OPEN = 3.0
TIMEOUT = 120.0

# Seconds for which a client keeps a connection that it does not use; the gateway waits longer.
KEEP = 5.0

WHOLE = "whole"
FAULT = "fault"

# What the gateway may say beside the closed list.
GATEWAY_CODES = frozenset({"request_timeout"})
REFUSALS = frozenset(code.lower() for code in ErrorCode) | GATEWAY_CODES


class FaultError(Exception):
    """An answer that is neither whole nor a refusal of the closed list."""


class Answer:
    """What came over server-sent events, or as one body."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.tokens = 0
        self.finish_reasons: list[str] = []
        self.completion_tokens: int | None = None
        self.done = False
        self.refusal: str | None = None

    def take(self, told: Any) -> None:
        """One JSON object of the answer."""
        if "error" in told:
            self.refusal = told["error"]["code"]
            return
        for choice in told["choices"]:
            delta = choice.get("delta") or choice.get("message") or {}
            self.texts.append(choice.get("text") or delta.get("content") or "")
            positions = choice.get("logprobs") or {}
            self.tokens += len(positions.get("tokens") or positions.get("content") or ())
            if choice.get("finish_reason"):
                self.finish_reasons.append(choice["finish_reason"])
        if told.get("usage"):
            self.completion_tokens = told["usage"]["completion_tokens"]


class SoakClient:
    """One client: it keeps a gRPC stream, and a connection to the gateway.

    Args:
        grpc, gateway: host:port.
    """

    def __init__(self, grpc: str, gateway: str) -> None:
        self._grpc = grpc
        self._gateway = gateway
        # What callers read of a server.
        server: Any = SimpleNamespace(grpc=grpc, service=SimpleNamespace(ensemble="deepseek", unary="deepseek_unary"))
        self._stream = GrpcStreamCaller(server)
        self._unary = GrpcUnaryCaller(server)
        self._connection: http.client.HTTPConnection | None = None
        self._used = 0.0

    def close(self) -> None:
        self._stream.close()
        self._unary.close()
        self._drop()

    # Normal requests.

    def ensemble(self, number: int) -> str:
        """A stream on the ensemble."""
        tokens = LENGTHS[number % len(LENGTHS)]
        return self._grpc_outcome(self._stream.call(Call(_inputs(_prompt(number), tokens), _headers(number))), tokens)

    def gateway_stream(self, number: int) -> str:
        """A completion or chat as events; every other one tells each token, so that none can be missing unseen."""
        tokens, counted = LENGTHS[number % len(LENGTHS)], number % 2 == 0
        path, body = _gateway_body(number, tokens, counted=counted)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        return _outcome(self._events(path, body, _headers(number)), tokens, counted=counted, stream=True)

    def gateway_whole(self, number: int) -> str:
        """A completion or chat as one answer."""
        tokens = LENGTHS[number % len(LENGTHS)]
        path, body = _gateway_body(number, tokens, counted=True)
        return _outcome(self._body(path, json.dumps(body).encode()), tokens, counted=True, stream=False)

    # Abnormal ones.

    def over_long(self, number: int) -> str:
        """A prompt or body that cannot be served; it has to be refused."""
        way = number % 3
        text = "x = 1\n" * (OVER_LONG // 6)
        if way == 0:
            outcome = self._grpc_outcome(self._stream.call(Call(_inputs(text, 16))), 16)
        elif way == 1:
            _, body = _gateway_body(0, 16, counted=False)
            outcome = _outcome(self._events("/v1/completions", body | {"prompt": text, "stream": True}), 16)
        else:
            outcome = _outcome(self._body("/v1/completions", b"[" + b" " * OVER_LARGE), 16)
            # The gateway has not read the rest.
            self._drop()
        return _refused(outcome, "context_length_exceeded", "request_too_large")

    def control_characters(self, number: int) -> str:
        """Characters that are text and look like none: they are served like others."""
        prompt = f"# {number} {CONTROL}\n"
        if number % 2:
            return self._grpc_outcome(self._stream.call(Call(_inputs(prompt, 16))), 16)
        body = {"model": "deepseek", "prompt": prompt, "max_tokens": 16, "ignore_eos": True}
        return _outcome(self._body("/v1/completions", json.dumps(body).encode()), 16)

    def broken_utf8(self, number: int) -> str:
        """Bytes that are no text; they have to be refused."""
        if number % 2:
            outcome = self._grpc_outcome(self._stream.call(Call(_inputs(BROKEN, 16))), 16)
        else:
            body = b'{"model": "deepseek", "max_tokens": 16, "prompt": "' + BROKEN + b'"}'
            outcome = _outcome(self._body("/v1/completions", body), 16)
        return _refused(outcome, "invalid_encoding", "invalid_json")

    def half_open(self, number: int) -> str:
        """A connection that stops in the middle of a request, or whose client reads nothing and is gone at last."""
        way = number % 3
        if way == 0:
            self._stall(self._gateway, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n{")
        elif way == 1:
            # The preface of HTTP/2 and half a frame.
            self._stall(self._grpc, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00")
        else:
            _, body = _gateway_body(number, LONG, counted=False)
            self._stall(self._gateway, _raw(body | {"stream": True}))
        return "left"

    def cancel(self, number: int) -> str:
        """A long stream that its client ends: by its token, by going away with and without it, and before its start."""
        way = number % 4
        if way == 0:
            return self._cancel_by_token(number)
        if way == 1:
            return self._leave_with_token(number)
        _, body = _gateway_body(number, LONG, counted=False)
        host, port = _host_port(self._gateway)
        with socket.create_connection((host, port), TIMEOUT) as connection:
            connection.sendall(_raw(body | {"stream": True}))
            if way == 2:
                # Until the first event, or the refusal that came in its place.
                connection.recv(4096)
        return "left"

    def _cancel_by_token(self, number: int) -> str:
        call = Call(_inputs(_prompt(number), LONG))
        call.on_first = lambda first: self._send_cancel(first["cancel_token"][0])
        outcome = self._grpc_outcome(self._stream.call(call), LONG)
        return outcome if outcome == WHOLE else _refused(outcome, "cancelled", "overloaded", "deadline_exceeded")

    def _leave_with_token(self, number: int) -> str:
        """Through the ensemble nobody sees it go, so it says so elsewhere."""
        call = Call(_inputs(_prompt(number), LONG), leave_after=1)
        told = self._stream.call(call)
        if told.error is not None:
            return self._grpc_outcome(told, LONG)
        self._send_cancel(told.responses[0]["cancel_token"][0])
        return "left"

    def _send_cancel(self, token: str) -> None:
        told = self._unary.call(Call({"extensions": {"cancel": token}}))
        if told.error is not None:
            raise FaultError(f"a cancel was answered {told.error}")

    def _stall(self, address: str, data: bytes) -> None:
        """Send, read nothing for a while, and be gone without a word."""
        with socket.create_connection(_host_port(address), TIMEOUT) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(data)
            time.sleep(HALF_OPEN)

    # Answers.

    def _grpc_outcome(self, told: Told, tokens: int) -> str:
        if told.error is not None:
            found = parse_error(told.error)
            if found is None:
                raise FaultError(f"an error without a code: {told.error}")
            return found.code.lower()
        count = sum(len(response.get("token_ids", ())) for response in told.responses)
        if (count, told.finish_reason) != (tokens, "length"):
            raise FaultError(f"{count} of {tokens} tokens came, and the end was {told.finish_reason}")
        return WHOLE

    def _events(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Answer:
        answer = Answer()
        for told in self._post(path, json.dumps(body).encode(), headers or {}):
            if told is None:
                answer.done = True
            else:
                answer.take(told)
        return answer

    def _body(self, path: str, content: bytes) -> Answer:
        answer = Answer()
        for told in self._post(path, content, {}):
            answer.take(told)
        return answer

    def _post(self, path: str, content: bytes, headers: dict[str, str]) -> Iterator[Any]:
        """The JSON objects of the answer; None for the end of a stream."""
        if time.monotonic() - self._used > KEEP:
            self._drop()
        connection = self._connection = self._connection or http.client.HTTPConnection(self._gateway, timeout=TIMEOUT)
        try:
            try:
                connection.request("POST", path, content, {"Content-Type": "application/json", **headers})
            except (BrokenPipeError, ConnectionResetError):
                # A body that is not read to its end was refused; the refusal is there.
                if connection.sock is None:
                    raise
            reply = connection.getresponse()
            if reply.headers.get_content_type() != "text/event-stream":
                yield json.loads(reply.read())
            for line in iter(reply.readline, b""):
                if line.startswith(b"data: "):
                    yield None if line.startswith(b"data: [DONE]") else json.loads(line[6:])
            self._used = time.monotonic()
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._drop()
            raise FaultError(f"{path}: {error!r}") from error

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


NORMAL: tuple[Callable[[SoakClient, int], str], ...] = (
    SoakClient.ensemble,
    SoakClient.gateway_stream,
    SoakClient.ensemble,
    SoakClient.gateway_stream,
    SoakClient.gateway_whole,
)
ABNORMAL: tuple[Callable[[SoakClient, int], str], ...] = (
    SoakClient.over_long,
    SoakClient.control_characters,
    SoakClient.broken_utf8,
    SoakClient.half_open,
    SoakClient.cancel,
)

# Those that Locust sends itself; what needs gRPC is left to soak_worker.py.
HERE = (SoakClient.gateway_stream, SoakClient.gateway_whole)


def outcome_of(client: SoakClient, name: str, number: int) -> tuple[str, str | None]:
    """Send the request of a method's name; what came of it, and what was wrong with it or None."""
    try:
        return getattr(client, name)(number), None
    except FaultError as error:
        return FAULT, str(error)
    except Exception as error:
        return FAULT, repr(error)


def _prompt(number: int) -> str:
    return f"# request {number}\ndef fibonacci(n):\n"


def _headers(number: int) -> dict[str, str]:
    """Some choose a side, some are sticky, most have no wish."""
    wish = number % 10
    if wish < 2:
        return {"x-canary": "true" if wish else "false"}
    return {"x-session-id": f"s{number % 50}"} if wish < 5 else {}


def _inputs(text: str | bytes, tokens: int) -> dict[str, Any]:
    return {
        "text_input": text,
        "return_finish_reason": True,
        "sampling_parameters": {"max_tokens": tokens, "ignore_eos": True, "temperature": 0.7},
    }


def _gateway_body(number: int, tokens: int, *, counted: bool) -> tuple[str, dict[str, Any]]:
    body = {"model": "deepseek", "max_tokens": tokens, "ignore_eos": True, "temperature": 0.7}
    if number % 4 < 2:
        return "/v1/completions", body | {"prompt": _prompt(number), "logprobs": 0 if counted else None}
    return "/v1/chat/completions", body | {
        "messages": [{"role": "user", "content": _prompt(number)}],
        "logprobs": counted or None,
    }


def _raw(body: dict[str, Any]) -> bytes:
    """A request as bytes, for a client that does not wait for its answer."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    content = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


def _outcome(answer: Answer, tokens: int, *, counted: bool = False, stream: bool = False) -> str:
    if answer.refusal is not None:
        if answer.refusal not in REFUSALS:
            raise FaultError(f"the code {answer.refusal} is none of the list")
        return answer.refusal
    if answer.finish_reasons != ["length"] or answer.completion_tokens not in (tokens, None):
        raise FaultError(f"{answer.completion_tokens} of {tokens} tokens, ended {answer.finish_reasons}")
    if stream and (not answer.done or answer.completion_tokens is None):
        raise FaultError("the stream ended without its usage or [DONE]")
    if counted and answer.tokens != tokens:
        raise FaultError(f"{answer.tokens} of {tokens} tokens were told")
    return WHOLE


def _refused(outcome: str, *codes: str) -> str:
    if outcome not in codes:
        raise FaultError(f"{outcome}, not {' or '.join(codes)}")
    return outcome


def _host_port(address: str) -> tuple[str, int]:
    host, _, port = address.partition(":")
    return host, int(port)
