"""An exported model in ONNX Runtime on a GPU, in the place of `gpu.decoder`."""

from collections.abc import Callable
from pathlib import Path

import onnxruntime
import torch
from torch import Tensor

from deepseek_engine.cache_spec import Cache, CacheSpec
from deepseek_engine.gpu.device_step import DeviceStep
from deepseek_engine.memory_budget import file_bytes
from deepseek_engine.models import ModelConfig
from deepseek_engine.runners.onnx_graph import HEAD_FILE, MODEL_FILE, OUT, ExportError, check_cache_stays, check_device
from deepseek_engine.runners.onnx_operators import ExportedOperators, exported_operators
from deepseek_engine.runners.onnx_session import Binding, cache_spec_of, check_config, open_session, session_options

PROVIDER = "CUDAExecutionProvider"


class OnnxDecoder:
    """A model that `piccard export --precision bfloat16` wrote, as `runners.cuda.CudaRunner` takes it.

    The sessions run on a stream of their own, between what torch has launched before and what it launches next; none of
    it waits on the host, so a run within a capture becomes part of the captured graph. That graph belongs to no thread,
    unlike those that ONNX Runtime captures by itself, and holds the sampling too.

    A step's tensors, the cache and the outputs are bound where they are: nothing is copied.

    Args:
        body, head: sessions of the export's two graphs, which run on `stream`.
        config: of the checkpoint that was exported.
        exported: what the sessions' operators are.
        device: where they run.
        stream: None where launches are in order anyway, on a CPU.
        outside: bytes on the device that torch's allocator does not know of, the sessions' among them.

    Raises:
        ExportError: the sessions are of another checkpoint.
    """

    batch_invariant = False
    # An operator expands what it attends to by itself.
    expands_keys = False
    takes_whole_rows = True

    def __init__(
        self,
        body: onnxruntime.InferenceSession,
        head: onnxruntime.InferenceSession,
        config: ModelConfig,
        *,
        exported: ExportedOperators,
        device: torch.device,
        stream: torch.cuda.Stream | None = None,
        outside: Callable[[], int] = lambda: 0,
    ) -> None:
        self.config = config
        self.exported = exported
        self.device = device
        self.outside_bytes = outside
        self._stream = stream
        self._cache_spec = cache_spec_of(body)
        check_config(config, body, head, self._cache_spec)
        self.dtype = self._cache_spec.planes[0].dtype
        self._body, self._head = Binding(body), Binding(head)
        self._run_options = onnxruntime.RunOptions()
        self._run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def cache_spec(self) -> CacheSpec:
        """The planes that the export was written for."""
        return self._cache_spec

    @torch.inference_mode()
    def forward(self, step: DeviceStep, cache: Cache) -> Tensor:
        """Run the step's tokens, writing their cache entries; returns [T, hidden] after the final norm."""
        for plane, layers in cache.items():
            for index, layer in enumerate(layers.unbind(0)):
                blocks = layer.view(-1, step.block_size, layer.shape[-1])
                self._body.input(f"{plane}_{index}", blocks)
                self._body.output(f"{plane}_{index}{OUT}", blocks)
        inputs = {
            "token_ids": step.token_ids,
            "sources": step.sources,
            "last_tokens": step.last_tokens,
            "positions": step.positions,
            "slots": step.slots,
            "block_tables": step.tables,
            "table_rows": step.table_rows,
            "query_starts": step.query_starts,
            "context_lengths": step.lengths,
            "host_batch": host_batch(step),
        }
        for name, tensor in inputs.items():
            self._body.input(name, tensor)
        hidden = torch.empty(len(step.token_ids), self.config.hidden_size, dtype=self.dtype, device=self.device)
        self._body.output("hidden", hidden)
        self._run(self._body)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[N, hidden] after the final norm -> float32 [N, vocab], in `out` where it is given."""
        if out is None:
            out = torch.empty(len(hidden), self.config.vocab_size, dtype=torch.float32, device=self.device)
        # Bound by its address alone: it has a name until the run is under way.
        rows = hidden.contiguous()
        self._head.input("hidden", rows)
        self._head.output("logits", out)
        self._run(self._head)
        return out

    def _run(self, bound: Binding) -> None:
        if self._stream is None:
            bound.run(self._run_options)
            return
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        bound.run(self._run_options)
        current.wait_stream(self._stream)


def load_onnx_decoder(
    folder: Path, library: Path, config: ModelConfig, *, device: torch.device, memory: int
) -> OnnxDecoder:
    """The model of an export.

    Args:
        folder: what `piccard export` wrote.
        library: the com.deepseek operators for CUDA.
        config: of the checkpoint that was exported.
        device: a CUDA device.
        memory: bytes that a session's arena may take.

    Raises:
        ExportError: export or library cannot be used, or an operator would not run on the device.
    """
    check_cache_stays(folder / MODEL_FILE)
    check_device(folder / MODEL_FILE, on_gpu=True)
    before = _outside_torch(device)
    stream = torch.cuda.Stream(device)
    providers = [(PROVIDER, provider_options(device, stream.cuda_stream, memory))]
    body, head = (open_session(folder / name, library, _options(), providers) for name in (MODEL_FILE, HEAD_FILE))
    for session in (body, head):
        check_placement(session)
    # Another version that loads meanwhile is counted here; what the files hold is ours in any case.
    least = file_bytes(folder, "*.data")
    return OnnxDecoder(
        body,
        head,
        config,
        exported=exported_operators(folder),
        device=device,
        stream=stream,
        outside=lambda: max(_outside_torch(device) - before, least),
    )


def host_batch(step: DeviceStep) -> Tensor:
    """int32 [V, 2] on the host: query tokens and cache entries of every sequence, which decide launches.

    Where a step is captured they are bounds of the tokens; decoding launches the same for any number of entries.
    """
    if step.host_rows is not None:
        return step.host_rows
    return torch.tensor([[step.max_queries, 1]], dtype=torch.int32).repeat(len(step.lengths), 1)


def provider_options(device: torch.device, stream: int, memory: int) -> dict[str, str]:
    """Of the CUDA provider: a stream of torch's, and an arena that takes what it is asked for, up to `memory` bytes."""
    return {
        "device_id": str(device.index or 0),
        "user_compute_stream": str(stream),
        "arena_extend_strategy": "kSameAsRequested",
        "gpu_mem_limit": str(memory),
    }


def check_placement(session: onnxruntime.InferenceSession) -> None:
    """Whether every node and every cache is on the device: else a step would copy between it and the host.

    Raises:
        ExportError: one is not; names it.
    """
    for part in session.get_provider_graph_assignment_info():
        for node in part.get_nodes() if part.ep_name != PROVIDER else ():
            raise ExportError(
                f"node {node.name!r}, a {node.op_type}, would run on {part.ep_name}, not on {PROVIDER}, and copy to and"
                " from the host in each step; publish the version again"
            )
    outputs = {each.name for each in session.get_outputs()}
    for each, memory in zip(session.get_inputs(), session.get_input_memory_infos(), strict=True):
        if f"{each.name}{OUT}" in outputs and memory.name == "Cpu":
            raise ExportError(
                f"an operator takes the cache {each.name} from the host's memory, and copies it in each step;"
                " publish the version again"
            )


def _options() -> onnxruntime.SessionOptions:
    options = session_options()
    # A pattern makes the second run of a shape take other memory than the first, and a captured run may take none.
    options.enable_mem_pattern = False
    for key in ("session.disable_cpu_ep_fallback", "session.record_ep_graph_assignment_info"):
        options.add_session_config_entry(key, "1")
    # Weights are not rounded up to the arena's sizes.
    options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    return options


def _outside_torch(device: torch.device) -> int:
    """Bytes in use on the device that this process's torch has not reserved."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)
