"""A double of `triton_python_backend_utils`, as the stub of server 24.10 hands it out or as that of newer ones.

Names, arguments and checks are those of pb_stub.cc, pb_response_iterator.cc and README.md of
github.com/triton-inference-server/python_backend (main, July 2026). What is newer: `parameters` of a response with the
method that reads them (25.02), and `cancel()` of the iterator of a decoupled BLS call (25.04).
"""

import json
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

FINAL = 1


class TritonModelException(Exception):  # noqa: N818
    """What calls of the server raise."""


class TritonError:
    """An error of a response."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message, self._code = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class Tensor:
    def __init__(self, name: str, array: np.ndarray[Any, Any]) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray[Any, Any]:
        return self._array


class OldResponse:
    """InferenceResponse of 24.10."""

    def __init__(self, output_tensors: list[Tensor] | None = None, error: TritonError | None = None) -> None:
        self._tensors, self._error = list(output_tensors or []), error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error


class NewResponse(OldResponse):
    """InferenceResponse since 25.02."""

    def __init__(
        self,
        output_tensors: list[Tensor] | None = None,
        error: TritonError | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(output_tensors, error)
        for name, value in (parameters or {}).items():
            if not isinstance(name, str):
                raise TritonModelException(f"Expect parameters keys to have type str, found type {type(name)}")
            if not isinstance(value, bool | int | str):
                raise TritonModelException(
                    f"Expect parameters values to have type bool/int/str, found type {type(value)}"
                )
        self._parameters = json.dumps(dict(parameters or {}))

    def parameters(self) -> str:
        return self._parameters


class ResponseSender:
    """Where a model's responses go.

    Attributes:
        cancelled: whether whoever asked is gone.
    """

    def __init__(self) -> None:
        self.responses: queue.Queue[tuple[Any, bool]] = queue.Queue()
        self.over = threading.Event()
        self.cancelled = False

    def send(self, response: Any = None, flags: int = 0) -> None:
        if self.over.is_set():
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        self.responses.put((response, flags == FINAL))
        if flags == FINAL:
            self.over.set()

    def is_cancelled(self) -> bool:
        return self.cancelled


class OldIterator:
    """ResponseIterator of 24.10: a decoupled BLS call that is read."""

    def __init__(self, sender: ResponseSender, empty: Callable[[], Any]) -> None:
        self._sender, self._empty, self._finished = sender, empty, False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._finished:
            raise StopIteration
        response, self._finished = self._sender.responses.get(timeout=60)
        return self._empty() if response is None else response


class NewIterator(OldIterator):
    """ResponseIterator since 25.04.

    Attributes:
        cancels: how often it was cancelled.
    """

    cancels = 0

    def cancel(self) -> None:
        if not self._finished:
            self.cancels += 1
            self._sender.cancelled = True


class Request:
    """A request that `execute` gets."""

    def __init__(self, inputs: Mapping[str, Any], outputs: list[str], parameters: Mapping[str, Any] | None = None):
        self.sender = ResponseSender()
        self._inputs = [Tensor(name, value) for name, value in inputs.items()]
        self._outputs, self._parameters = outputs, dict(parameters or {})

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def requested_output_names(self) -> list[str]:
        return self._outputs

    def parameters(self) -> str:
        return json.dumps(self._parameters)

    def request_id(self) -> str:
        return "a"

    def get_response_sender(self) -> ResponseSender:
        return self.sender


class _Metric:
    def __init__(self) -> None:
        self._value = 0.0

    def increment(self, by: float) -> None:
        self._value += by

    def set(self, value: float) -> None:
        self._value = value

    def value(self) -> float:
        return self._value


class MetricFamily:
    COUNTER, GAUGE, HISTOGRAM = range(3)

    def __init__(self, name: str, description: str, kind: int) -> None:
        self.name = name

    def Metric(self, labels: Mapping[str, str] | None = None) -> _Metric:  # noqa: N802
        return _Metric()


def fake_pb_utils(*, newer: bool, models: dict[tuple[str, int], Any]) -> ModuleType:
    """The module.

    Args:
        newer: whether it is that of a newer server.
        models: what BLS calls by name and version: objects with `execute`.

    Its attribute `calls` keeps the iterators of all BLS calls.
    """
    module: Any = ModuleType("triton_python_backend_utils")
    response = NewResponse if newer else OldResponse
    iterator = NewIterator if newer else OldIterator

    class InferenceRequest:
        def __init__(
            self, *, inputs: list[Tensor], requested_output_names: list[str], model_name: str, model_version: int = -1
        ) -> None:
            self._model = models[model_name, model_version]
            arrays = {tensor.name(): tensor.as_numpy() for tensor in inputs}
            self._request = Request(arrays, requested_output_names)

        def exec(self, decoupled: bool = False) -> OldIterator:
            assert decoupled
            self._model.execute([self._request])
            call = iterator(self._request.sender, response)
            module.calls.append(call)
            return call

    def get_input_tensor_by_name(request: Request, name: str) -> Tensor | None:
        return next((tensor for tensor in request.inputs() if tensor.name() == name), None)

    def using_decoupled_model_transaction_policy(config: dict[str, Any]) -> bool:
        return bool(config.get("model_transaction_policy", {}).get("decoupled", False))

    module.calls = []
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
    module.TritonError, module.TritonModelException, module.Tensor = TritonError, TritonModelException, Tensor
    module.InferenceResponse, module.InferenceRequest, module.MetricFamily = response, InferenceRequest, MetricFamily
    module.Logger = SimpleNamespace(log_error=lambda text: module.errors.append(text))
    module.errors = []
    module.get_input_tensor_by_name = get_input_tensor_by_name
    module.using_decoupled_model_transaction_policy = using_decoupled_model_transaction_policy
    found: ModuleType = module
    return found
