"""What newer servers bring and 24.10 lacks: looked for on what the server hands out, never told by its version.

Only the adapters call this, with the module `triton_python_backend_utils` of the process that they run in or with an
object that it made.
"""

from collections.abc import Callable, Mapping
from typing import Any


def response_parameters(pb_utils: Any) -> bool:
    """Whether a response can carry parameters (25.02). The class got the method that reads them with it."""
    return hasattr(pb_utils.InferenceResponse, "parameters")


def make_response(pb_utils: Any, tensors: list[Any], parameters: Mapping[str, bool | int | str]) -> Any:
    """A response with its parameters, which are left out where a server has none."""
    if parameters and response_parameters(pb_utils):
        return pb_utils.InferenceResponse(output_tensors=tensors, parameters=dict(parameters))
    return pb_utils.InferenceResponse(output_tensors=tensors)


def cancel_of(responses: Any) -> Callable[[], None] | None:
    """What cancels a decoupled BLS call by its iterator (25.04); None where nothing does."""
    cancel: Callable[[], None] | None = getattr(responses, "cancel", None)
    return cancel
