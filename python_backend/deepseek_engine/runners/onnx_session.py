"""A session of ONNX Runtime over an export's graph, and its inputs and outputs bound to torch's memory."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch
from torch import Tensor

from deepseek_engine.cache_spec import CachePlane, CacheSpec
from deepseek_engine.models import ModelConfig
from deepseek_engine.runners.onnx_graph import OUT, ExportError

# The element types of ONNX, as bindings take them.
_NUMBERS = {
    torch.float32: onnx.TensorProto.FLOAT,
    torch.float16: onnx.TensorProto.FLOAT16,
    torch.bfloat16: onnx.TensorProto.BFLOAT16,
    torch.int32: onnx.TensorProto.INT32,
    torch.int64: onnx.TensorProto.INT64,
}
_DTYPES = {"tensor(float)": torch.float32, "tensor(float16)": torch.float16, "tensor(bfloat16)": torch.bfloat16}


def session_options() -> onnxruntime.SessionOptions:
    """Of every session: quiet, and on the calling thread where kernels have none of their own."""
    options = onnxruntime.SessionOptions()
    options.inter_op_num_threads = 1
    # Errors; the runtime's warnings are about nodes that no model of ours could do without.
    options.log_severity_level = 3
    return options


def open_session(
    path: Path, library: Path, options: onnxruntime.SessionOptions, providers: Sequence[Any]
) -> onnxruntime.InferenceSession:
    """The session.

    Args:
        library: the com.deepseek operators.
        providers: as onnxruntime takes them.

    Raises:
        ExportError: the graph or the library cannot be used.
    """
    try:
        options.register_custom_ops_library(str(library))
        return onnxruntime.InferenceSession(str(path), options, providers=providers)
    # The runtime's errors have no class of their own.
    except Exception as error:
        raise ExportError(f"{path} cannot be opened with the operators in {library}: {error}") from error


def cache_spec_of(session: onnxruntime.InferenceSession) -> CacheSpec:
    """Of the inputs latent_0, latent_1, ... [blocks, block size, width], which have outputs of their names and _out."""
    outputs = {each.name for each in session.get_outputs()}
    planes: dict[str, list[tuple[int, torch.dtype]]] = {}
    for each in session.get_inputs():
        if f"{each.name}{OUT}" in outputs:
            planes.setdefault(each.name.rpartition("_")[0], []).append((each.shape[2], _DTYPES[each.type]))
    return CacheSpec(tuple(CachePlane(name, len(each), *_one(each)) for name, each in planes.items()))


def _one(values: Iterable[tuple[int, torch.dtype]]) -> tuple[int, torch.dtype]:
    (value,) = set(values)
    return value


def check_config(
    config: ModelConfig,
    body: onnxruntime.InferenceSession,
    head: onnxruntime.InferenceSession,
    cache: CacheSpec,
) -> None:
    """Whether the sessions of an export are of a checkpoint.

    Raises:
        ExportError: they are of another; tells both.
    """
    layers = {plane.layers for plane in cache.planes}
    found = (
        body.get_modelmeta().graph_name,
        head.get_outputs()[0].shape[1],
        head.get_inputs()[0].shape[1],
        *sorted(layers),
    )
    wanted = (config.architecture, config.vocab_size, config.hidden_size, config.num_hidden_layers)
    if found != wanted:
        raise ExportError(
            "the export is of another checkpoint: its architecture, vocabulary, hidden size and layers are"
            f" {', '.join(map(str, found))} and the checkpoint's {', '.join(map(str, wanted))}; publish it again"
        )


class Binding:
    """What a session reads and writes, bound to addresses; a name is bound again when its address or shape changes.

    Only addresses are kept: tensors have to stay until what reads them is done.
    """

    def __init__(self, session: onnxruntime.InferenceSession) -> None:
        self._session = session
        self._binding = session.io_binding()
        self._bound: dict[str, tuple[int, torch.Size, torch.dtype]] = {}

    def input(self, name: str, tensor: Tensor) -> None:
        """Bind a contiguous tensor, on whichever device it is."""
        self._bind(self._binding.bind_input, name, tensor)

    def output(self, name: str, tensor: Tensor) -> None:
        """Bind a contiguous tensor that the session is to write."""
        self._bind(self._binding.bind_output, name, tensor)

    def run(self, options: onnxruntime.RunOptions | None = None) -> None:
        """Run over what is bound."""
        self._session.run_with_iobinding(self._binding, options)

    def _bind(self, bind: Any, name: str, tensor: Tensor) -> None:
        place = (tensor.data_ptr(), tensor.shape, tensor.dtype)
        if self._bound.get(name) == place:
            return
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has to be contiguous to be bound")
        device = tensor.device
        bind(name, device.type, device.index or 0, _NUMBERS[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())
        self._bound[name] = place
