"""Asks a version for tokens: golden prompts after a load and in a rollout, and one token for /readyz."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from piccard_contract.home import Service
from piccard_contract.request import GatewayClaims, RequestExtensions

from piccard.errors import OperationError
from piccard.keys import own_claims

GOLDEN_PROMPTS = (
    "def fibonacci(n):\n",
    "The deepest point of the sea is",
    "深海の底には何がありますか。",
)
GOLDEN_TOKENS = 8

_NO_EXTENSIONS = RequestExtensions()


class ProbeError(OperationError):
    """A version did not answer as a good one does."""


@dataclass(slots=True)
class Answer:
    """What a generation gave; `details` holds the keys of all its responses."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)
    served_version: int | None = None
    details: dict[str, Any] = field(default_factory=dict)


def probe_version(address: str, service: Service, version: int, timeout: float) -> None:
    """Give a version the golden prompts, greedily and each twice.

    Args:
        address: host:port of the server's gRPC.
        timeout: seconds for each answer.

    Raises:
        ProbeError: an answer fails, is empty, or differs from the first time.
    """
    claims = own_claims(service)
    for prompt in GOLDEN_PROMPTS:
        first, second = (
            generate_once(address, service.llm, prompt, GOLDEN_TOKENS, timeout, version=version, claims=claims)
            for _ in range(2)
        )
        for answer in (first, second):
            if answer.status.get("code") != "OK":
                told = answer.status.get("message") or "it ended without a status"
                raise ProbeError(f"probe {prompt!r} failed: {told}")
            if not answer.token_ids:
                raise ProbeError(f"probe {prompt!r} gave no token")
        if first.token_ids != second.token_ids:
            raise ProbeError(f"probe {prompt!r} gave other tokens the second time, at temperature 0")


def generate_once(
    address: str,
    model: str,
    prompt: str | Sequence[Mapping[str, Any]],
    max_tokens: int,
    timeout: float,
    *,
    version: int | None = None,
    parameters: Mapping[str, str] | None = None,
    claims: GatewayClaims | None = None,
    sampling: Mapping[str, Any] | None = None,
    extensions: RequestExtensions = _NO_EXTENSIONS,
) -> Answer:
    """One greedy generation over a gRPC stream.

    Args:
        prompt: a text, or the messages of a chat.
        timeout: seconds.
        claims: in whose name.
        sampling: further sampling parameters.

    Raises:
        ProbeError: the server refuses it, or it is not over in `timeout` seconds.
    """
    import tritonclient.grpc
    from tritonclient.utils import InferenceServerException

    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    client = tritonclient.grpc.InferenceServerClient(address)
    answer = Answer()
    try:
        client.start_stream(lambda result, error: answers.put((result, error)))
        try:
            client.async_stream_infer(
                model,
                _inputs(prompt, max_tokens, sampling or {}, extensions.model_copy(update={"gateway": claims})),
                model_version="" if version is None else str(version),
                enable_empty_final_response=True,
                parameters=dict(parameters or {}),
            )
        except InferenceServerException as error:
            raise ProbeError(f"no connection to {address}") from error
        deadline = time.monotonic() + timeout
        while _take(answer, *_next(answers, deadline, timeout)):
            pass
    except BaseException:
        client.stop_stream(cancel_requests=True)
        raise
    else:
        # Not cancelled: a cancel that meets a request's last response keeps its model from ever being unloaded.
        client.stop_stream()
    finally:
        client.close()
    return answer


def _inputs(
    prompt: str | Sequence[Mapping[str, Any]],
    max_tokens: int,
    sampling: Mapping[str, Any],
    extensions: RequestExtensions,
) -> list[Any]:
    import numpy as np
    import tritonclient.grpc

    told = json.dumps({"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **sampling})
    kind, text = ("text_input", prompt) if isinstance(prompt, str) else ("messages", json.dumps(prompt))
    inputs = []
    for name, datatype, value in (
        (kind, "BYTES", np.array([text.encode()], dtype=object)),
        ("stream", "BOOL", np.array([True])),
        ("sampling_parameters", "BYTES", np.array([told.encode()], dtype=object)),
        ("extensions", "BYTES", np.array([extensions.model_dump_json(exclude_defaults=True).encode()], dtype=object)),
    ):
        tensor = tritonclient.grpc.InferInput(name, [1], datatype)
        tensor.set_data_from_numpy(value)
        inputs.append(tensor)
    return inputs


def _next(answers: queue.SimpleQueue[tuple[Any, Any]], deadline: float, timeout: float) -> tuple[Any, Any]:
    try:
        return answers.get(timeout=max(0.0, deadline - time.monotonic()))
    except queue.Empty:
        raise ProbeError(f"no complete answer within {timeout:g} s") from None


def _take(answer: Answer, result: Any, error: Any) -> bool:
    """Add a response to `answer`; whether more will come."""
    if error is not None:
        raise ProbeError(error.message() or str(error))
    if (text := result.as_numpy("text_output")) is not None:
        answer.text += text[0].decode("utf-8")
    if (tokens := result.as_numpy("token_ids")) is not None:
        answer.token_ids += [int(token) for token in tokens]
    if (status := result.as_numpy("status")) is not None:
        answer.status = json.loads(status[0])
    if (details := result.as_numpy("details")) is not None:
        answer.details |= json.loads(details[0])
    if (version := result.as_numpy("served_version")) is not None:
        answer.served_version = int(version[0])
    return not result.get_response().parameters["triton_final_response"].bool_param
