"""Every entry point of a service behind one call, so that a test can be run over all of them."""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as aioclient
import tritonclient.http as httpclient
from piccard_contract.errors import RequestError, parse_error
from piccard_contract.tensors import DATATYPES, INPUT_SPECS
from piccard_server import RunningServer
from triton_calls import JSON_INPUTS, GrpcStream, Outputs, elements, grpc_inputs, outputs_of
from tritonclient.utils import InferenceServerException

TIMEOUT = 60.0


@dataclass
class Answer:
    """What a client saw of a request.

    Attributes:
        responses: outputs of each response, as lists of plain values.
        status: the gRPC status or HTTP status it came under; None on a gRPC stream, which has none.
        error_text: as Triton gave it.
    """

    responses: list[Outputs] = field(default_factory=list)
    status: str | int | None = None
    error_text: str | None = None

    @property
    def text(self) -> str:
        return "".join(response["text_output"][0] for response in self.responses)

    @property
    def token_ids(self) -> list[int]:
        return [token for response in self.responses for token in response["token_ids"]]

    @property
    def version(self) -> int:
        """Of the last response."""
        version: int = self.responses[-1]["served_version"][0]
        return version

    @property
    def reason(self) -> str:
        """Of the last response."""
        reason: str = self.responses[-1]["route_reason"][0]
        return reason

    @property
    def details(self) -> dict[str, Any]:
        """Of the last response."""
        details: dict[str, Any] = json.loads(self.responses[-1]["details"][0])
        return details

    @property
    def error(self) -> RequestError | None:
        """The error with its code; a text without a head fails the test."""
        if self.error_text is None:
            return None
        found = parse_error(self.error_text)
        assert found is not None, f"no head in {self.error_text!r}"
        return found

    @property
    def code(self) -> str:
        return "OK" if self.error is None else self.error.code.value


# (server, headers or keys, request parameters, inputs) -> what the client saw.
EntryPoint = Callable[[RunningServer, dict[str, str], dict[str, Any], dict[str, Any]], Answer]


def grpc_stream(
    server: RunningServer, headers: dict[str, str], parameters: dict[str, Any], inputs: dict[str, Any]
) -> Answer:
    answer = Answer()
    metadata = {name.lower(): value for name, value in headers.items()}
    with GrpcStream(server.grpc, metadata) as stream:
        stream.send(server.service.ensemble, parameters=parameters, **inputs)
        try:
            answer.responses.extend(stream.responses(TIMEOUT))
        except InferenceServerException as error:
            answer.error_text = error.message()
    return answer


def grpc_aio_stream(
    server: RunningServer, headers: dict[str, str], parameters: dict[str, Any], inputs: dict[str, Any]
) -> Answer:
    async def run() -> Answer:
        answer = Answer()

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {
                "model_name": server.service.ensemble,
                "inputs": grpc_inputs(**inputs),
                "parameters": parameters,
                "enable_empty_final_response": True,
            }

        metadata = {name.lower(): value for name, value in headers.items()}
        async with aioclient.InferenceServerClient(server.grpc) as client:
            async for result, error in client.stream_infer(requests(), headers=metadata):
                if error is not None:
                    answer.error_text = error.message()
                    break
                outputs = outputs_of(result)
                if outputs:
                    answer.responses.append(outputs)
                if result.get_response().parameters["triton_final_response"].bool_param:
                    break
        return answer

    return asyncio.run(asyncio.wait_for(run(), TIMEOUT))


def generate(
    server: RunningServer, headers: dict[str, str], parameters: dict[str, Any], inputs: dict[str, Any]
) -> Answer:
    return _post(server, "generate", {**inputs, **headers, **parameters})


def generate_stream(
    server: RunningServer, headers: dict[str, str], parameters: dict[str, Any], inputs: dict[str, Any]
) -> Answer:
    return _post(server, "generate_stream", {**inputs, **headers, **parameters})


def grpc_unary(
    server: RunningServer, headers: dict[str, str], parameters: dict[str, Any], inputs: dict[str, Any]
) -> Answer:
    metadata = {name.lower(): value for name, value in headers.items()}
    with grpcclient.InferenceServerClient(server.grpc) as client:
        try:
            result = client.infer(
                server.service.unary,
                grpc_inputs(**inputs),
                headers=metadata,
                parameters=parameters,
                client_timeout=TIMEOUT,
            )
        except InferenceServerException as error:
            return Answer(status=str(error.status()).removeprefix("StatusCode."), error_text=error.message())
    return Answer([outputs_of(result)], "OK")


def http_infer(
    server: RunningServer, headers: dict[str, str], parameters: dict[str, Any], inputs: dict[str, Any]
) -> Answer:
    with httpclient.InferenceServerClient(server.http, network_timeout=TIMEOUT) as client:
        try:
            result = client.infer(
                server.service.unary, _http_inputs(inputs), headers=dict(headers), parameters=parameters
            )
        except InferenceServerException as error:
            return Answer(status=int(error.status()), error_text=error.message())
    outputs = {}
    for output in result.get_response()["outputs"]:
        values = result.as_numpy(output["name"]).reshape(-1).tolist()
        outputs[output["name"]] = [item.decode() if isinstance(item, bytes) else item for item in values]
    return Answer([outputs], 200)


ENTRY_POINTS: dict[str, EntryPoint] = {
    "grpc_stream": grpc_stream,
    "grpc_aio_stream": grpc_aio_stream,
    "generate": generate,
    "generate_stream": generate_stream,
    "grpc_unary": grpc_unary,
    "http_infer": http_infer,
}

# Those that can send tokens as they come.
STREAMING = ("grpc_stream", "grpc_aio_stream", "generate_stream")


def _http_inputs(inputs: dict[str, Any]) -> list[httpclient.InferInput]:
    made = []
    for name, value in inputs.items():
        spec = INPUT_SPECS[name]
        values = elements(name, value)
        if spec.datatype == "BYTES":
            values = [item.encode() if isinstance(item, str) else item for item in values]
        array = np.array(values, dtype=np.dtype(DATATYPES[spec.datatype][1]))
        tensor = httpclient.InferInput(name, list(array.shape), spec.datatype)
        tensor.set_data_from_numpy(array)
        made.append(tensor)
    return made


def _post(server: RunningServer, action: str, fields: dict[str, Any]) -> Answer:
    body = {
        name: json.dumps(value) if name in JSON_INPUTS and not isinstance(value, str | bytes) else value
        for name, value in fields.items()
    }
    body = {name: value.decode() if isinstance(value, bytes) else value for name, value in body.items()}
    url = f"http://{server.http}/v2/models/{server.service.ensemble}/{action}"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as opened:
            return _read(opened.status, opened.read().decode())
    except urllib.error.HTTPError as error:
        return _read(error.code, error.read().decode())


def _read(status: int, body: str) -> Answer:
    answer = Answer(status=status)
    for line in body.splitlines():
        if not line.strip():
            continue
        event = json.loads(line.removeprefix("data:"))
        if "error" in event:
            answer.error_text = event["error"]
        else:
            answer.responses.append({k: v if isinstance(v, list) else [v] for k, v in event.items()})
    return answer
