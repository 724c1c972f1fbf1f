"""Calls of a model on a running server, over each of its entry points, with inputs as plain values."""

import json
import queue
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from piccard_contract.tensors import DATATYPES, INPUT_SPECS

# JSON objects among the inputs; the others are sent as they are.
JSON_INPUTS = ("sampling_parameters", "messages", "extensions")

Outputs = dict[str, list[Any]]


def elements(name: str, value: Any) -> list[Any]:
    """The elements of an input: JSON written out, a single value as a list of one."""
    if name in JSON_INPUTS and not isinstance(value, str | bytes):
        value = json.dumps(value)
    return value if isinstance(value, list) else [value]


def grpc_inputs(**inputs: Any) -> list[grpcclient.InferInput]:
    """The inputs as tritonclient's."""
    made = []
    for name, value in inputs.items():
        spec = INPUT_SPECS[name]
        values = elements(name, value)
        if spec.datatype == "BYTES":
            values = [item.encode() if isinstance(item, str) else item for item in values]
        array = np.array(values, dtype=np.dtype(DATATYPES[spec.datatype][1]))
        tensor = grpcclient.InferInput(name, list(array.shape), spec.datatype)
        tensor.set_data_from_numpy(array)
        made.append(tensor)
    return made


def outputs_of(result: grpcclient.InferResult) -> Outputs:
    """All outputs of a result, BYTES as str."""
    outputs = {}
    for output in result.get_response().outputs:
        values = result.as_numpy(output.name).reshape(-1).tolist()
        outputs[output.name] = [item.decode() if isinstance(item, bytes) else item for item in values]
    return outputs


def text_of(responses: list[Outputs]) -> str:
    """The text of all responses to a request."""
    return "".join(response["text_output"][0] for response in responses)


class GrpcStream:
    """One bidirectional stream to a server; use it as a context manager.

    Args:
        address: host:port.
        headers: metadata of the stream.
    """

    def __init__(self, address: str, headers: dict[str, str] | None = None) -> None:
        self._client = grpcclient.InferenceServerClient(address)
        self._events: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._client.start_stream(callback=lambda result, error: self._events.put((result, error)), headers=headers)

    def __enter__(self) -> "GrpcStream":
        return self

    def __exit__(self, kind: object = None, *_: object) -> None:
        # Without a cancel the end of a stream waits for its requests, and one that hangs is what failed the test.
        self._client.stop_stream(cancel_requests=kind is not None)
        self._client.close()

    def send(
        self,
        model: str,
        *,
        version: str = "",
        request_id: str = "",
        parameters: dict[str, Any] | None = None,
        **inputs: Any,
    ) -> None:
        """Send a request; its responses come from `responses`."""
        self._client.async_stream_infer(
            model,
            grpc_inputs(**inputs),
            model_version=version,
            request_id=request_id,
            parameters=parameters,
            enable_empty_final_response=True,
        )

    def next(self, timeout: float = 60.0) -> tuple[Outputs, bool]:
        """The next response and whether it is the final one. Raises InferenceServerException for an error."""
        result, error = self._events.get(timeout=timeout)
        if error is not None:
            raise error
        response = result.get_response()
        return outputs_of(result), response.parameters["triton_final_response"].bool_param

    def responses(self, timeout: float = 60.0) -> Iterator[Outputs]:
        """Responses of the request that was sent, up to the final one; empty ones are left out."""
        final = False
        while not final:
            outputs, final = self.next(timeout)
            if outputs:
                yield outputs

    def cancel(self) -> None:
        """Break the stream as a client that goes away does."""
        self._client.stop_stream(cancel_requests=True)


def grpc_stream(
    address: str,
    model: str,
    *,
    version: str = "",
    headers: dict[str, str] | None = None,
    parameters: dict[str, Any] | None = None,
    timeout: float = 60.0,
    **inputs: Any,
) -> list[Outputs]:
    """One request on a gRPC stream of its own; returns its responses, each of which is waited for `timeout` seconds."""
    with GrpcStream(address, headers) as stream:
        stream.send(model, version=version, parameters=parameters, **inputs)
        return list(stream.responses(timeout))


def http_generate(
    address: str,
    model: str,
    *,
    version: str = "",
    stream: bool = False,
    headers: dict[str, str] | None = None,
    timeout: float = 60.0,
    **fields: Any,
) -> tuple[int, list[dict[str, Any]]]:
    """POST /generate, or /generate_stream with `stream`: the status and the JSON objects of the answer.

    `stream` is sent as the input too; `headers` are HTTP's own, which Triton keeps from the model here.
    """
    with open_generate(
        address, model, version=version, stream=stream, headers=headers, timeout=timeout, **fields
    ) as answer:
        body = answer.read().decode()
    if not stream:
        return answer.status, [json.loads(body)]
    return answer.status, [json.loads(line.removeprefix("data:")) for line in body.splitlines() if line.strip()]


def open_generate(
    address: str,
    model: str,
    *,
    version: str = "",
    stream: bool = False,
    headers: dict[str, str] | None = None,
    timeout: float = 60.0,
    **fields: Any,
) -> Any:
    """The open answer of /generate or /generate_stream, also where its status tells of an error."""
    where = f"models/{model}/versions/{version}" if version else f"models/{model}"
    action = "generate_stream" if stream else "generate"
    body = {
        name: json.dumps(value) if name in JSON_INPUTS and not isinstance(value, str) else value
        for name, value in fields.items()
    }
    if stream:
        body.setdefault("stream", True)
    request = urllib.request.Request(
        f"http://{address}/v2/{where}/{action}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", **(headers or {})},
    )
    try:
        return urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        return error
