"""Sees which references a model's steps run, and how long they take on a GPU."""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
from piccard_contract.operators import REFERENCE
from torch import Tensor

from deepseek_engine.batch import Batch
from deepseek_engine.cache_spec import Cache
from deepseek_engine.gpu.fusions import NOT_IN_USE, capability_of, kernel_obstacle
from deepseek_engine.kernels.dispatch import DISPATCH, Choice, Dispatch
from deepseek_engine.kernels.references import REFERENCES
from deepseek_engine.models import ModelConfig

WATCHED_STEPS = 3
"""A version's warm-up takes a prompt and decodes: its first steps run all that a model calls."""

_OPERATORS: dict[CodeType, str] = {
    function.__code__: name for name, functions in REFERENCES.items() for function in functions
}


class ReferenceWatch:
    """Runs a model's steps, and watches the first few.

    On a GPU a watched step runs twice, which writes the same cache entries again: the second time it is warm, and each
    reference is timed with events on the device's stream. The host launches them one by one, so that the time of an
    operator holds the device's waits for it, as every later step has them. On a CPU nothing is timed.

    Args:
        config: the model's.
        device, dtype: of its weights.
        dispatch: is told.
    """

    def __init__(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype, dispatch: Dispatch = DISPATCH
    ) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._dispatch = dispatch
        self._left = WATCHED_STEPS
        self._operators: set[str] = set()
        self._obstacle = kernel_obstacle(config, device, dtype, capability_of(device)) or NOT_IN_USE

    def forward(self, forward: Callable[[Batch, Cache], Tensor], batch: Batch, cache: Cache) -> Tensor:
        """`forward(batch, cache)`."""
        if self._left:
            self._left -= 1
            if self._on_gpu:
                forward(batch, cache)
            hidden = self._watched(lambda: forward(batch, cache))
        else:
            hidden = forward(batch, cache)
        if self._on_gpu:
            for operator in self._operators:
                self._dispatch.fall_back(operator, self._obstacle.cause, self._obstacle.reason)
        return hidden

    def _watched(self, step: Callable[[], Tensor]) -> Tensor:
        calls: defaultdict[str, list[tuple[Any, Any]]] = defaultdict(list)
        with _observed(lambda operator, begin, end: calls[operator].append((begin, end)), self._mark):
            result = step()
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        for operator, spans in calls.items():
            choice = Choice(operator, None, self._obstacle.reason)
            served = self._dispatch.record(choice, REFERENCE, fallback=self._on_gpu)
            if self._on_gpu:
                served.seconds = sum(begin.elapsed_time(end) for begin, end in spans) / 1000
        self._operators.update(calls)
        return result

    def _mark(self) -> Any:
        if not self._on_gpu:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


@contextmanager
def _observed(told: Callable[[str, Any, Any], None], mark: Callable[[], Any]) -> Iterator[None]:
    """Within it, tell of every reference that this thread calls, with a mark before and one after.

    By the interpreter's hook for profilers, so that references need no wrapper, which every later step would pay for.
    """
    running: list[tuple[FrameType, str, Any]] = []

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and not running and frame.f_code in _OPERATORS:
            running.append((frame, _OPERATORS[frame.f_code], mark()))
        elif event == "return" and running and running[0][0] is frame:
            _, operator, begin = running.pop()
            told(operator, begin, mark())

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)
