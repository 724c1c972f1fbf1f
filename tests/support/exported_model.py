"""An exported model in ONNX Runtime, with the interface of the engine's models."""

from pathlib import Path

import onnxruntime
import torch
from deepseek_engine.batch import Batch
from deepseek_engine.cache_spec import Cache, CacheSpec
from deepseek_engine.models import Model
from one_node import NUMBERS
from torch import Tensor


class ExportedModel:
    """Runs steps over the engine's own cache, whose layers are bound and written in place."""

    def __init__(self, path: Path, library: Path, like: Model) -> None:
        """`like` is the engine's model of the same checkpoint: its configuration and cache."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        options.register_custom_ops_library(str(library))
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.config = like.config
        self._like = like

    def cache_spec(self) -> CacheSpec:
        return self._like.cache_spec()

    def forward(self, batch: Batch, cache: Cache) -> Tensor:
        """Logits [T, vocab] at once; `logits` passes them on."""
        inputs = {
            "token_ids": batch.token_ids,
            "positions": batch.positions,
            "block_tables": batch.block_tables,
            "query_starts": torch.tensor(batch.query_starts),
            "context_lengths": torch.tensor(batch.context_lengths),
            "logits_indices": torch.arange(batch.num_tokens),
        }
        logits = torch.full((batch.num_tokens, self.config.vocab_size), float("nan"))
        outputs = {"logits": logits}
        for plane, layers in cache.items():
            for index, layer in enumerate(layers):
                blocks = layer.view(-1, batch.block_size, layer.shape[-1])
                inputs[f"{plane}_{index}"] = outputs[f"{plane}_{index}_out"] = blocks
        binding = self.session.io_binding()
        for name, tensor in inputs.items():
            binding.bind_input(name, "cpu", 0, NUMBERS[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())
        for name, tensor in outputs.items():
            binding.bind_output(name, "cpu", 0, NUMBERS[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())
        self.session.run_with_iobinding(binding)
        return logits

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden
