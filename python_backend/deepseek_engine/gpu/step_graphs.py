"""CUDA graphs of whole steps, captured once and replayed."""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

_log = logging.getLogger(__name__)

R = TypeVar("R")


@dataclass(slots=True)
class _Captured(Generic[R]):
    graph: Any
    result: R


class StepGraphs(Generic[R]):
    """Functions of fixed shapes, by key.

    All graphs share one pool of memory, since they run one after the other: what one returns holds until the next is
    replayed. Without a CUDA device the functions themselves run, so that everything else can be tested.

    Attributes:
        captures: graphs captured so far; constant once warm.
        replays: graphs run so far.
        ungraphed: runs without a graph since the first capture, by cause.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._device = device
        self._functions: dict[Any, Callable[[], R]] = {}
        self._captured: dict[Any, _Captured[R]] = {}
        self._pool: Any = None
        self.captures = 0
        self.replays = 0
        self.ungraphed: Counter[str] = Counter()

    def __contains__(self, key: Any) -> bool:
        return key in self._functions

    def define(self, key: Any, function: Callable[[], R]) -> None:
        """Let a function run under a key without a graph."""
        self._functions[key] = function

    def capture(self, key: Any, function: Callable[[], R]) -> None:
        """Run the function once, which compiles what it needs, and capture a second run of it.

        It reads and writes tensors that stay where they are, and waits for nothing on the host.
        """
        self._functions[key] = function
        function()
        if not self._on_gpu:
            return
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = function()
        self._pool = self._pool or graph.pool()
        self._captured[key] = _Captured(graph, result)
        self.captures += 1

    def go_without(self, cause: str) -> None:
        """Count a run that no graph is for; before the first capture every one is, and none counts."""
        if self.captures:
            self.ungraphed[cause] += 1

    def run(self, key: Any, *, eager: bool = False) -> R:
        """Replay a graph on the current stream, or run its function where it was not captured or `eager` says so."""
        captured = self._captured.get(key)
        if captured is None or eager:
            self.go_without("a graph's tensors were replaced" if captured else "no graph of the size")
            return self._functions[key]()
        self.replays += 1
        captured.graph.replay()
        return captured.result
