"""Clients that send one request after the other over a connection that they keep, one class an entry point."""

import http.client
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import tritonclient.grpc as grpcclient
from piccard_contract.tensors import INPUT_SPECS
from piccard_server import RunningServer
from triton_calls import JSON_INPUTS, GrpcStream, Outputs, elements, grpc_inputs, outputs_of
from tritonclient.utils import InferenceServerException

TIMEOUT = 60.0


@dataclass(slots=True)
class Call:
    """One request.

    Attributes:
        parameters: of the request; those that are forwarded headers read as such.
        leave_after: responses after which the client goes away without a word; None stays to the end.
        on_first: told the first response as soon as it came.
    """

    inputs: dict[str, Any]
    parameters: dict[str, Any] = field(default_factory=dict)
    leave_after: int | None = None
    on_first: Callable[[Outputs], object] = lambda outputs: None


@dataclass(slots=True)
class Told:
    """What a client was told: the outputs of every response, and the error that ended the request."""

    responses: list[Outputs] = field(default_factory=list)
    error: str | None = None

    @property
    def text(self) -> str:
        return "".join(response["text_output"][0] for response in self.responses)

    @property
    def versions(self) -> list[int]:
        """What served it, in order and each once."""
        return list(dict.fromkeys(response["served_version"][0] for response in self.responses))

    @property
    def finish_reason(self) -> str | None:
        """Why it ended; None where no response says so."""
        reasons = [reason for response in self.responses for reason in response.get("finish_reason", ())]
        ended = [reason for reason in reasons if reason not in (None, "None")]
        return ended[-1] if ended else None

    @property
    def details(self) -> dict[str, Any]:
        """Of the last response that has any."""
        found = [response["details"][0] for response in self.responses if response.get("details")]
        details: dict[str, Any] = json.loads(found[-1]) if found else {}
        return details


class Caller(Protocol):
    """One connection to a server; used by one thread."""

    def call(self, call: Call) -> Told:
        """Send a request and read it to its end, or to where its client goes away."""
        ...

    def close(self) -> None: ...


def _heard(call: Call, told: Told, outputs: Outputs) -> bool:
    """Take a response; whether the client goes away now."""
    told.responses.append(outputs)
    if len(told.responses) == 1:
        call.on_first(outputs)
    return len(told.responses) == call.leave_after


class GrpcStreamCaller:
    """Streams, one after the other on one gRPC stream."""

    def __init__(self, server: RunningServer) -> None:
        self._address = server.grpc
        self._model = server.service.ensemble
        self._stream: GrpcStream | None = None

    def call(self, call: Call) -> Told:
        told = Told()
        self._stream = stream = self._stream or GrpcStream(self._address)
        try:
            stream.send(self._model, parameters=call.parameters, stream=True, **call.inputs)
            for outputs in stream.responses(TIMEOUT):
                if _heard(call, told, outputs):
                    self._leave()
                    break
        except InferenceServerException as error:
            told.error = error.message()
            # A request that failed ends with its error; what the stream has still to say would be taken for the next's.
            self._leave()
        return told

    def close(self) -> None:
        if self._stream is not None:
            self._stream.__exit__()
            self._stream = None

    def _leave(self) -> None:
        assert self._stream is not None
        self._stream.__exit__(InferenceServerException)
        self._stream = None


class GrpcUnaryCaller:
    """One answer a request, over gRPC."""

    def __init__(self, server: RunningServer) -> None:
        self._model = server.service.unary
        self._client = grpcclient.InferenceServerClient(server.grpc)

    def call(self, call: Call) -> Told:
        try:
            result = self._client.infer(
                self._model, grpc_inputs(**call.inputs), parameters=call.parameters, client_timeout=TIMEOUT
            )
        except InferenceServerException as error:
            return Told(error=error.message())
        return Told([outputs_of(result)])

    def close(self) -> None:
        self._client.close()


class HttpInferCaller:
    """One answer a request, over HTTP /infer."""

    def __init__(self, server: RunningServer) -> None:
        self._path = f"/v2/models/{server.service.unary}/infer"
        self._connection = _HttpConnection(server.http)

    def call(self, call: Call) -> Told:
        inputs = []
        for name, value in call.inputs.items():
            values = elements(name, value)
            inputs.append(
                {"name": name, "shape": [len(values)], "datatype": INPUT_SPECS[name].datatype, "data": values}
            )
        body = json.loads(self._connection.post(self._path, {"inputs": inputs, "parameters": call.parameters}).read())
        if "error" in body:
            return Told(error=body["error"])
        return Told([{output["name"]: output["data"] for output in body["outputs"]}])

    def close(self) -> None:
        self._connection.close()


class GenerateStreamCaller:
    """Streams over HTTP /generate_stream."""

    def __init__(self, server: RunningServer) -> None:
        self._path = f"/v2/models/{server.service.ensemble}/generate_stream"
        self._connection = _HttpConnection(server.http)

    def call(self, call: Call) -> Told:
        fields = {
            name: json.dumps(value) if name in JSON_INPUTS and not isinstance(value, str) else value
            for name, value in call.inputs.items()
        }
        told = Told()
        answer = self._connection.post(self._path, {"stream": True, **fields, **call.parameters})
        for event in _events(answer):
            if "error" in event:
                told.error = event["error"]
                continue
            if _heard(call, told, {k: v if isinstance(v, list) else [v] for k, v in event.items()}):
                self._connection.close()
                break
        return told

    def close(self) -> None:
        self._connection.close()


CALLERS: dict[str, type[Caller]] = {
    "grpc_stream": GrpcStreamCaller,
    "grpc_unary": GrpcUnaryCaller,
    "http_infer": HttpInferCaller,
    "generate_stream": GenerateStreamCaller,
}


class _HttpConnection:
    """A kept connection, opened again where the server or we closed it."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._connection: http.client.HTTPConnection | None = None

    def post(self, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
        if self._connection is None:
            self._connection = http.client.HTTPConnection(self._address, timeout=TIMEOUT)
        self._connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return self._connection.getresponse()

    def close(self) -> None:
        if self._connection is None:
            return
        if self._connection.sock is not None:
            with suppress(OSError):
                self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        self._connection = None


def _events(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """JSON objects of server-sent events, or the one object of an answer that is an error."""
    for line in iter(answer.readline, b""):
        text = line.strip().removeprefix(b"data:")
        if text:
            yield json.loads(text)
