"""DeepSeek's models, loaded from Hugging Face folders by their on-disk names."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from deepseek_engine.batch import Batch
from deepseek_engine.cache_spec import Cache, CacheSpec
from deepseek_engine.models.config import Fields, ModelConfig
from deepseek_engine.models.decoder import Decoder
from deepseek_engine.models.errors import CheckpointError
from deepseek_engine.models.registry import build_model, read_model_config
from deepseek_engine.models.weights import Checkpoint

__all__ = ["CheckpointError", "Model", "ModelConfig", "load_config", "load_model", "unread_tensors"]


class Model(Protocol):
    """A causal language model whose state is a paged cache."""

    config: ModelConfig

    def cache_spec(self) -> CacheSpec:
        """The planes that `forward` needs."""

    def forward(self, batch: Batch, cache: Cache) -> Tensor:
        """Run the batch's tokens, writing their cache entries; returns [T, hidden] after the final norm."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] after the final norm -> float32 [N, vocab]."""


def load_config(folder: Path) -> ModelConfig:
    """A checkpoint's settings alone, without its weights. Raises CheckpointError."""
    return read_model_config(Fields.read(Path(folder) / "config.json"))


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> Decoder:
    """The model in a Hugging Face folder: config.json, and model.safetensors or its shards and their index.

    dtype: what weights and activations are converted to; where the file already has it, unfused weights stay mapped.
    progress: called with the bytes read so far and the bytes of all files; the last call has the two equal.
    Raises CheckpointError, naming the file, tensor or architecture.
    """
    folder = Path(folder)
    config = load_config(folder)
    checkpoint = Checkpoint(folder, dtype=dtype, device=device, progress=progress)
    model = build_model(config, checkpoint)
    checkpoint.finish(ignore=unread_tensors(config))
    return model


def unread_tensors(config: ModelConfig) -> tuple[str, ...]:
    """Patterns of tensors that may be in a checkpoint and that no model reads."""
    # Layers past the last are the MTP modules; old Llama files carry their rotary frequencies.
    mtp = rf"^model\.layers\.(?!({'|'.join(str(layer) for layer in range(config.num_hidden_layers))})\.)"
    return mtp, r"rotary_emb\.inv_freq$", r"^lm_head\.weight$"
