"""An exported model in ONNX Runtime, with the interface of the engine's models, for the runner beside it."""

import ctypes
from collections.abc import Iterable
from pathlib import Path

import onnx
import onnxruntime
import torch
from torch import Tensor

from deepseek_engine.batch import Batch
from deepseek_engine.cache_spec import Cache, CachePlane, CacheSpec
from deepseek_engine.models import ModelConfig

MODEL_FILE, HEAD_FILE = "model.onnx", "head.onnx"
DOMAIN = "com.deepseek"
_OUT = "_out"
# The element types of ONNX, as bindings take them.
_NUMBERS = {torch.float32: onnx.TensorProto.FLOAT, torch.int64: onnx.TensorProto.INT64}


class ExportError(ValueError):
    """An export that cannot be run; says what to change."""


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
        self._body = _session(folder / MODEL_FILE, library, threads)
        self._head = _session(folder / HEAD_FILE, library, threads)
        self._cache_spec = _cache_spec(self._body)
        self._check(folder)
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
                    self._step.bind(f"{plane}_{index}", blocks, f"{plane}_{index}{_OUT}")
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

    def _check(self, folder: Path) -> None:
        config = self.config
        layers = {plane.layers for plane in self._cache_spec.planes}
        found = (
            self._body.get_modelmeta().graph_name,
            self._head.get_outputs()[0].shape[1],
            self._head.get_inputs()[0].shape[1],
            *sorted(layers),
        )
        wanted = (config.architecture, config.vocab_size, config.hidden_size, config.num_hidden_layers)
        if found != wanted:
            raise ExportError(
                f"{folder} is an export of another checkpoint: architecture, vocabulary, hidden size and layers are"
                f" {', '.join(map(str, found))} and the checkpoint's {', '.join(map(str, wanted))}; publish it again"
            )


class BoundStep:
    """A session's inputs and outputs, bound to memory that stays: a name is bound again when its shape changes."""

    def __init__(self, session: onnxruntime.InferenceSession) -> None:
        self._session = session
        self._binding = session.io_binding()
        # The binding knows addresses only.
        self._kept: dict[str, Tensor] = {}

    def bind(self, name: str, tensor: Tensor, output: str) -> None:
        """Bind an input, and an output that is written to the same memory, once and for all."""
        self._kept[name] = tensor
        self._bind_input(name, tensor)
        self._bind_output(output, tensor)

    def run(self, inputs: dict[str, Tensor], output: str, shape: tuple[int, ...]) -> Tensor:
        """The output float32 of a run, in memory of its own."""
        for name, tensor in inputs.items():
            kept = self._kept.get(name)
            if kept is None or kept.shape != tensor.shape:
                self._kept[name] = kept = torch.empty_like(tensor)
                self._bind_input(name, kept)
            kept.copy_(tensor)
        made = torch.empty(shape)
        self._bind_output(output, made)
        self._session.run_with_iobinding(self._binding)
        return made

    def _bind_input(self, name: str, tensor: Tensor) -> None:
        self._binding.bind_input(name, "cpu", 0, _NUMBERS[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())

    def _bind_output(self, name: str, tensor: Tensor) -> None:
        self._binding.bind_output(name, "cpu", 0, _NUMBERS[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())


def check_cache_stays(path: Path) -> None:
    """Whether a graph's cache goes from its input to its output through our operators alone.

    Anything else, such as a Cast, copies all of it in each step.

    Raises:
        ExportError: it does not, or there is no such graph; names the node.
    """
    try:
        graph = onnx.load(str(path), load_external_data=False).graph
    except Exception as error:
        raise ExportError(f"{path} cannot be read ({error}); publish the version again") from error
    names = {each.name for each in graph.input}
    caches = {each.name.removesuffix(_OUT) for each in graph.output if each.name.endswith(_OUT)} & names
    for node in graph.node:
        touched = caches & {*node.input, *(name.removesuffix(_OUT) for name in node.output)}
        if touched and node.domain != DOMAIN:
            raise ExportError(
                f"{path}: node {node.name!r}, a {node.op_type}, copies the cache {min(touched)} in each step; publish"
                " the version again"
            )


def _session(path: Path, library: Path, threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Threads that spin between two kernels take the processor from the server beside them.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # Errors; the runtime's warnings are about nodes that no model of ours could do without.
    options.log_severity_level = 3
    try:
        options.register_custom_ops_library(str(library))
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    # The runtime's errors have no class of their own.
    except Exception as error:
        raise ExportError(f"{path} cannot be opened with the operators in {library}: {error}") from error


def _cache_spec(session: onnxruntime.InferenceSession) -> CacheSpec:
    """Of the inputs latent_0, latent_1, ... [blocks, block size, width], which have outputs of their names and _out."""
    outputs = {each.name for each in session.get_outputs()}
    caches = [each for each in session.get_inputs() if f"{each.name}{_OUT}" in outputs]
    planes: dict[str, list[int]] = {}
    for each in caches:
        planes.setdefault(each.name.rpartition("_")[0], []).append(each.shape[2])
    return CacheSpec(
        tuple(CachePlane(name, len(widths), _one(widths), torch.float32) for name, widths in planes.items())
    )


def _one(values: Iterable[int]) -> int:
    (value,) = set(values)
    return value
