"""Counts and times what the warm-up is to have done once and for all: compilations and captures of graphs."""

import time
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Tally:
    """How often, and seconds together."""

    count: int = 0
    seconds: float = 0.0


class Compilations(Tally):
    """Of Triton: kernels compiled, or loaded from its cache (`hits` of them)."""

    hits: int = 0

    def watch(self) -> bool:
        """Whether there is a Triton to watch."""
        try:
            import triton
        except ImportError:
            return False
        before = triton.knobs.compilation.listener

        def listen(**event: Any) -> None:
            if before is not None:
                before(**event)
            self.count += 1
            self.hits += bool(event["cache_hit"])
            self.seconds += event["times"].total / 1e6

        triton.knobs.compilation.listener = listen
        return True


class Captures(Tally):
    """Of CUDA graphs."""

    def watch(self, graph: Any = None) -> None:
        """graph: the class that captures; torch's where it is None."""
        kind: Any = torch.cuda.CUDAGraph if graph is None else graph
        begin, end = kind.capture_begin, kind.capture_end
        started = 0.0

        def capture_begin(this: Any, *arguments: Any, **named: Any) -> Any:
            nonlocal started
            started = time.perf_counter()
            return begin(this, *arguments, **named)

        def capture_end(this: Any, *arguments: Any, **named: Any) -> Any:
            try:
                return end(this, *arguments, **named)
            finally:
                self.count += 1
                self.seconds += time.perf_counter() - started

        kind.capture_begin, kind.capture_end = capture_begin, capture_end
