"""An exported model in ONNX Runtime on a CPU, with the interface of the engine's models, for the runner beside it."""

import ctypes
from pathlib import Path

import onnxruntime
import torch
from torch import Tensor

from deepseek_engine.batch import Batch
from deepseek_engine.cache_spec import Cache, CacheSpec
from deepseek_engine.models import ModelConfig
from deepseek_engine.runners.onnx_graph import HEAD_FILE, MODEL_FILE, OUT, check_cache_stays, check_device
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
        self._body = _session(folder / MODEL_FILE, library, threads)
        self._head = _session(folder / HEAD_FILE, library, threads)
        self._cache_spec = cache_spec_of(self._body)
        check_config(config, self._body, self._head, self._cache_spec)
        self._computed = ctypes.CDLL(str(library)).piccard_ops_computed
        self._computed.restype = ctypes.c_uint64
        self._bound: Cache | None = None
        self._step = BoundStep(self._body)
        self._last = BoundStep(self._head)

    def cache_spec(self) -> CacheSpec:
        """The planes that the export was written for."""
        return self._cache_spec

    def computed(self) -> int:
        """Grows while a step gets on, operator by operator; any thread may ask."""
        return int(self._computed())

    def forward(self, batch: Batch, cache: Cache) -> Tensor:
        """Run the batch's tokens, writing their cache entries; returns [T, hidden] after the final norm."""
        if cache is not self._bound:
            self._step = BoundStep(self._body)
            for plane, layers in cache.items():
                for index, layer in enumerate(layers):
                    blocks = layer.view(-1, batch.block_size, layer.shape[-1])
                    self._step.bind(f"{plane}_{index}", blocks, f"{plane}_{index}{OUT}")
            self._bound = cache
        inputs = {
            "token_ids": batch.token_ids,
            "positions": batch.positions,
            "block_tables": batch.block_tables,
            "query_starts": torch.tensor(batch.query_starts),
            "context_lengths": torch.tensor(batch.context_lengths),
        }
        return self._step.run(inputs, "hidden", (batch.num_tokens, self.config.hidden_size))

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] after the final norm -> float32 [N, vocab]."""
        rows = hidden.contiguous()
        return self._last.run({"hidden": rows}, "logits", (len(rows), self.config.vocab_size))


class BoundStep:
    """A session's inputs and outputs, bound to memory of their own: a step's numbers are copied there."""

    def __init__(self, session: onnxruntime.InferenceSession) -> None:
        self._binding = Binding(session)
        self._kept: dict[str, Tensor] = {}

    def bind(self, name: str, tensor: Tensor, output: str) -> None:
        """Bind an input, and an output that is written to the same memory, once and for all."""
        self._kept[name] = tensor
        self._binding.input(name, tensor)
        self._binding.output(output, tensor)

    def run(self, inputs: dict[str, Tensor], output: str, shape: tuple[int, ...]) -> Tensor:
        """The output float32 of a run, in memory of its own."""
        for name, tensor in inputs.items():
            kept = self._kept.get(name)
            if kept is None or kept.shape != tensor.shape:
                self._kept[name] = kept = torch.empty_like(tensor)
                self._binding.input(name, kept)
            kept.copy_(tensor)
        made = torch.empty(shape)
        self._binding.output(output, made)
        self._binding.run()
        return made


def _session(path: Path, library: Path, threads: int) -> onnxruntime.InferenceSession:
    options = session_options()
    options.intra_op_num_threads = threads
    # Threads that spin between two kernels take the processor from the server beside them.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return open_session(path, library, options, ["CPUExecutionProvider"])
