"""Calls of a word or two: whether a running server answers, and with which version."""

import queue
import urllib.request

from entry_points import ENTRY_POINTS
from piccard_server import RunningServer
from triton_calls import grpc_inputs, grpc_stream, outputs_of
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

# Seconds after which a call is given up and sent again: one in the hands of a process that dies, be it a router or a
# version that is called itself, is never answered, though new ones soon are.
TRY_TIMEOUT = 10.0


def served_by(
    server: RunningServer,
    model: str | None = None,
    *,
    canary: bool = False,
    version: str = "",
    timeout: float = 60.0,
) -> int:
    """The version that streams one token.

    Args:
        model: the ensemble where it is not given.
        canary: whether X-Canary asks for the canary or forbids it.
        version: of the model; the server chooses where it is empty.
        timeout: seconds.

    Raises:
        InferenceServerException: the call failed.
        queue.Empty: no response came in time.
    """
    responses = grpc_stream(
        server.grpc,
        model or server.service.ensemble,
        version=version,
        headers={"x-canary": "true" if canary else "false"},
        timeout=timeout,
        text_input="one",
        stream=True,
        sampling_parameters={"max_tokens": 1},
    )
    served: int = responses[0]["served_version"][0]
    return served


def answers(server: RunningServer, model: str | None = None, *, canary: bool = False) -> bool:
    """Whether a new request is answered, by version 2 for the canary and else by stable.

    After a kill this is to be waited for also where /readyz says yes: it keeps an answer for a second, and what is
    asked may be the one from before.
    """
    try:
        version = served_by(server, model, canary=canary, timeout=TRY_TIMEOUT)
    except (InferenceServerException, queue.Empty):
        return False
    return version == (2 if canary else server.state().stable)


def answers_unary(server: RunningServer) -> bool:
    """Whether a unary call over gRPC is answered."""
    client = InferenceServerClient(server.grpc)
    inputs = grpc_inputs(text_input="one", sampling_parameters={"max_tokens": 1})
    try:
        result = client.infer(server.service.unary, inputs, client_timeout=TRY_TIMEOUT)
    except InferenceServerException:
        return False
    finally:
        client.close()
    return bool(outputs_of(result)["text_output"])


def answers_http(server: RunningServer) -> bool:
    """Whether two words over HTTP come back twice, as scripted versions repeat them."""
    inputs = {"text_input": "a b", "sampling_parameters": {"max_tokens": 2}}
    return ENTRY_POINTS["http_infer"](server, {}, {}, inputs).text == "a b a b"


def answers_gateway(server: RunningServer) -> bool:
    """Whether its gateway reaches tritonserver."""
    try:
        with urllib.request.urlopen(f"http://{server.gateway}/health", timeout=60) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
