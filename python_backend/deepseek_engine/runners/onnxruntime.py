"""An exported model in ONNX Runtime on a CPU, with the interface of the engine's models, for the runner beside it."""

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor

from deepseek_engine.batch import Batch
from deepseek_engine.cache_spec import Cache, CacheSpec
from deepseek_engine.models import ModelConfig
from deepseek_engine.runners.onnx_graph import HEAD_FILE, MODEL_FILE, OUT, check_cache_stays, check_device
from deepseek_engine.runners.onnx_operators import exported_operators
from deepseek_engine.runners.onnx_session import Binding, cache_spec_of, check_config, open_session, session_options


class OnnxModel:
    """A model that `piccard export` wrote, on a CPU.

    A step's session reads and writes the engine's own cache: each layer is bound once, as an input and as the output
    that shares its memory. Nothing but the step's numbers is copied.

    Args:
        folder: the export.
        library: the com.deepseek operators.
        config: of the checkpoint that was exported.
        threads: threads that a kernel is shared among.

    Raises:
        ExportError: the export, or the library, cannot be used.
    """

    def __init__(self, folder: Path, library: Path, config: ModelConfig, *, threads: int) -> None:
        self.config = config
        check_cache_stays(folder / MODEL_FILE)
        check_device(folder / MODEL_FILE, on_gpu=False)
        self.exported = exported_operators(folder)
        self._body = _session(folder / MODEL_FILE, library, threads)
        self._head = _session(folder / HEAD_FILE, library, threads)
        self._cache_spec = cache_spec_of(self._body)
        check_config(config, self._body, self._head, self._cache_spec)
        self._computed = ctypes.CDLL(str(library)).piccard_ops_computed
        self._computed.restype = ctypes.c_uint64
        self._bound: Cache | None = None
        self._options = onnxruntime.RunOptions()
        # The runtime's Python asks for it at every run, by an exception in C++ where it is not set.
        self._options.add_run_config_entry("gpu_graph_id", "0")
        self._step = BoundStep(self._body)
        self._last = BoundStep(self._head)

    def cache_spec(self) -> CacheSpec:
        """The planes that the export was written for."""
        return self._cache_spec

    def computed(self) -> int:
        """Grows while a step gets on, operator by operator; any thread may ask."""
        return int(self._computed())

    def forward(self, batch: Batch, cache: Cache) -> Tensor:
        """Run the batch's tokens, writing their cache entries; returns [T, hidden] after the final norm.

        It stands until the next call.

        Raises:
            StepGivenUpError: the batch's interrupt was set; a part of the entries is written.
        """
        if cache is not self._bound:
            self._step = BoundStep(self._body)
            for plane, layers in cache.items():
                for index, layer in enumerate(layers):
                    blocks = layer.view(-1, batch.block_size, layer.shape[-1])
                    self._step.bind(f"{plane}_{index}", blocks, f"{plane}_{index}{OUT}")
            self._bound = cache
        inputs: dict[str, Tensor | list[int]] = {
            "token_ids": batch.token_ids,
            "positions": batch.positions,
            "block_tables": batch.block_tables,
            "query_starts": batch.query_starts,
            "context_lengths": batch.context_lengths,
        }
        shape = (batch.num_tokens, self.config.hidden_size)
        if batch.interrupt is None:
            return self._step.run(inputs, "hidden", shape)
        # The runtime looks at it before each node.
        self._options.terminate = False
        with batch.interrupt.stopping(self._terminate):
            return self._step.run(inputs, "hidden", shape, self._options)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] after the final norm -> float32 [N, vocab], which stands until the next call."""
        inputs: dict[str, Tensor | list[int]] = {}
        if hidden is self._step.made:
            self._last.read("hidden", hidden)
        else:
            inputs["hidden"] = hidden.contiguous()
        return self._last.run(inputs, "logits", (hidden.shape[0], self.config.vocab_size))

    def _terminate(self) -> None:
        self._options.terminate = True


class BoundStep:
    """A session's inputs and outputs, bound to memory of their own: a step's numbers are copied there.

    Attributes:
        made: what the last run made.
    """

    def __init__(self, session: onnxruntime.InferenceSession) -> None:
        self._binding = Binding(session)
        self._kept: dict[str, Tensor] = {}
        # The same memory for numpy, which takes lists as they are and copies few numbers sooner than torch does.
        self._arrays: dict[str, np.ndarray[Any, Any]] = {}
        self.made: Tensor | None = None

    def bind(self, name: str, tensor: Tensor, output: str) -> None:
        """Bind an input, and an output that is written to the same memory, once and for all."""
        self._kept[name] = tensor
        self._binding.input(name, tensor)
        self._binding.output(output, tensor)

    def read(self, name: str, tensor: Tensor) -> None:
        """Have the runs to come read an input where it lies."""
        if self._kept.get(name) is not tensor:
            self._arrays.pop(name, None)
            self._kept[name] = tensor
            self._binding.input(name, tensor)

    def run(
        self,
        inputs: Mapping[str, Tensor | list[int]],
        output: str,
        shape: tuple[int, ...],
        options: onnxruntime.RunOptions | None = None,
    ) -> Tensor:
        """The output float32 of a run, which stands until the next one; a list of integers is int64."""
        for name, given in inputs.items():
            values = np.array(given) if isinstance(given, list) else given.numpy()
            kept = self._arrays.get(name)
            if kept is None or kept.shape != values.shape:
                self._arrays[name] = kept = np.empty_like(values)
                self._kept[name] = torch.from_numpy(kept)
                self._binding.input(name, self._kept[name])
            kept[...] = values
        # Once bound, memory is written again: to bind and allocate takes as long as some operators.
        if self.made is None or self.made.shape != shape:
            self.made = torch.empty(shape)
            self._binding.output(output, self.made)
        self._binding.run(options)
        return self.made


def _session(path: Path, library: Path, threads: int) -> onnxruntime.InferenceSession:
    options = session_options()
    options.intra_op_num_threads = threads
    # Threads that spin between two kernels take the processor from the server beside them.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return open_session(path, library, options, ["CPUExecutionProvider"])
