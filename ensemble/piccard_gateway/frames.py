"""Requests and responses of Triton's gRPC stream, as plain messages.

tritonclient's own wrappers go by numpy, which costs more a response than all the rest of a stream here.
"""

import json
from collections.abc import Iterator
from struct import Struct
from typing import Any

from piccard_contract.response import Choice, Response, parse_response
from tritonclient.grpc import service_pb2 as pb

from piccard_gateway.generator import Generation

_LENGTH = Struct("<I")
_INT64 = Struct("<q")
_READERS = {"BYTES": lambda raw: list(texts(raw)), "INT64": lambda raw: [v for (v,) in _INT64.iter_unpack(raw)]}

_ALWAYS = ("text_output", "served_version", "route_reason", "cancel_token", "status", "details")
_WITH_LOGPROBS = (*_ALWAYS, "token_ids", "logprobs")


def request_of(asked: Generation) -> Any:
    """The ModelInferRequest of a generation, a stream whose cancel token comes before a late first token."""
    request = pb.ModelInferRequest(model_name=asked.service)
    if asked.text is not None:
        _bytes(request, "text_input", asked.text)
    if asked.messages is not None:
        _bytes(request, "messages", json.dumps(asked.messages))
    if asked.input_ids is not None:
        raw = b"".join(map(_INT64.pack, asked.input_ids))
        _tensor(request, "input_ids", "INT64", len(asked.input_ids), raw)
    _bytes(request, "sampling_parameters", json.dumps(asked.sampling))
    _bytes(request, "extensions", json.dumps({**asked.extensions, "announce": True}))
    _tensor(request, "stream", "BOOL", 1, b"\1")
    if asked.wants_logprobs:
        _tensor(request, "return_logprobs", "BOOL", 1, b"\1")
    for name, value in asked.parameters.items():
        if isinstance(value, int):
            request.parameters[name].int64_param = value
        else:
            request.parameters[name].string_param = value
    for name in _WITH_LOGPROBS if asked.wants_logprobs else _ALWAYS:
        request.outputs.add(name=name)
    return request


def cancel_of(service: str, token: str) -> Any:
    """The ModelInferRequest that ends the generation of `token`."""
    request = pb.ModelInferRequest(model_name=f"{service}_unary")
    _bytes(request, "extensions", json.dumps({"cancel": token}))
    request.outputs.add(name="details")
    return request


def response_of(message: Any) -> Response:
    """The response in a ModelInferResponse.

    Raises:
        ValueError: it is none of this contract.
    """
    outputs = message.outputs
    raws = message.raw_output_contents
    if len(outputs) == 2 and outputs[0].name == "text_output" and outputs[1].name == "served_version":
        # All of a stream but its first and last.
        return Response(choices=[Choice(text=text.decode()) for text in texts(raws[0])])
    return parse_response(
        {output.name: _READERS[output.datatype](raw) for output, raw in zip(outputs, raws, strict=True)}
    )


def is_final(message: Any) -> bool:
    """Whether nothing follows a ModelInferResponse."""
    return "triton_final_response" in message.parameters and message.parameters["triton_final_response"].bool_param


def texts(raw: bytes) -> Iterator[bytes]:
    """Elements of a BYTES tensor: each has its length before it, in four bytes."""
    start = 0
    while start < len(raw):
        (length,) = _LENGTH.unpack_from(raw, start)
        start += 4 + length
        yield raw[start - length : start]


def _bytes(request: Any, name: str, text: str) -> None:
    data = text.encode()
    _tensor(request, name, "BYTES", 1, _LENGTH.pack(len(data)) + data)


def _tensor(request: Any, name: str, datatype: str, size: int, raw: bytes) -> None:
    request.inputs.add(name=name, datatype=datatype, shape=[size])
    request.raw_input_contents.append(raw)
