"""The decoder on a GPU: embedding, layers of attention and feed-forward, norm and head."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepseek_engine.cache_spec import Cache, CachePlane, CacheSpec
from deepseek_engine.gpu.attention import Attention, AttentionKind
from deepseek_engine.gpu.device_step import DeviceStep
from deepseek_engine.gpu.feed_forward import FeedForward
from deepseek_engine.gpu.grouped_attention import grouped_attention
from deepseek_engine.gpu.latent_attention import latent_attention
from deepseek_engine.gpu.mixture_of_experts import MixtureOfExperts
from deepseek_engine.gpu.product import Product
from deepseek_engine.kernels.rms_norm_triton import add_rms_norm, rms_norm
from deepseek_engine.kernels.rope import rope_table
from deepseek_engine.kernels.small_gemm_triton import Workspace
from deepseek_engine.kernels.step_inputs_triton import embed
from deepseek_engine.models import unread_tensors
from deepseek_engine.models.config import DeepseekConfig, LlamaConfig, ModelConfig
from deepseek_engine.models.rope_frequencies import rope_frequencies, rotation_factor
from deepseek_engine.models.weights import Checkpoint


@dataclass(slots=True)
class Layer:
    """One layer; the norms are weights [hidden]."""

    input_norm: Tensor
    attention: Attention[Any]
    post_attention_norm: Tensor
    mlp: FeedForward | MixtureOfExperts


class GpuDecoder:
    """A causal language model over a paged cache, for CUDA devices (and for Triton's interpreter, in tests).

    The residual is one tensor that each norm adds the last product to, so that no addition costs a launch of its own.

    Args:
        config: the model's, a DeepseekConfig or a LlamaConfig.
        checkpoint: its weights, on the device.
        positions: how many positions the rotations are made for; no sequence may be longer.
        batch_invariant: tiles and splits are fixed, so that a sequence's logits are the same bits whatever runs beside
            it.

    Raises:
        CheckpointError: the weights are not the config's.
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        positions: int | None = None,
        batch_invariant: bool = False,
    ) -> None:
        self.config = config
        self.batch_invariant = batch_invariant
        self.dtype = checkpoint.dtype
        self.device = torch.device(checkpoint.device)
        self.on_layer: Callable[[], None] = lambda: None
        vocabulary = (config.vocab_size, config.hidden_size)
        self._workspace = Workspace.reserve(4096, self.device)
        self._attention = _attention_kind(config, self.dtype)
        self.embedding = checkpoint.tensor("model.embed_tokens.weight", *vocabulary)
        self.layers = [self._load_layer(checkpoint, layer) for layer in range(config.num_hidden_layers)]
        self.norm = checkpoint.tensor("model.norm.weight", config.hidden_size)
        tied = config.tie_word_embeddings
        head = self.embedding if tied else checkpoint.tensor("lm_head.weight", *vocabulary)
        self.lm_head = Product(head, self._workspace)
        frequencies = rope_frequencies(config.rope, self._attention.rotary_dim).to(self.device)
        self._positions = positions = positions or config.max_position_embeddings
        self._rotations = rope_table(frequencies, rotation_factor(config.rope), positions)
        if batch_invariant:
            self.lm_head.fixed = True
            for layer in self.layers:
                layer.attention.fix()
                layer.mlp.fix()

    def cache_spec(self) -> CacheSpec:
        layers = self.config.num_hidden_layers
        planes = self._attention.planes.items()
        return CacheSpec(tuple(CachePlane(name, layers, width, self.dtype) for name, width in planes))

    @property
    def expands_keys(self) -> bool:
        """Whether `DeviceStep.prefill` has to hold the chunks in which prompts' keys are expanded."""
        return self._attention.expands

    @property
    def takes_whole_rows(self) -> bool:
        """Long rows have kernels of their own."""
        return False

    def outside_bytes(self) -> int:
        """All of it is torch's."""
        return 0

    def observe_experts(self, observer: Callable[[int, Tensor], None] | None) -> None:
        """Have `observer` called with each layer's choices, int32 [T, top_k + shared], in steps that run eagerly."""
        for layer in self.layers:
            if isinstance(layer.mlp, MixtureOfExperts):
                layer.mlp.on_experts = observer

    @torch.inference_mode()
    def forward(self, step: DeviceStep, cache: Cache) -> Tensor:
        """Run the step's tokens, writing their cache entries; returns [T, hidden] after the final norm."""
        eps = self.config.rms_norm_eps
        fixed_tokens = self._positions if self.batch_invariant else 0
        plan = self._attention.plan(step, fixed_tokens) if step.num_decoded else None
        residual = embed(step.token_ids, step.sources, step.last_tokens, self.embedding)
        planes = {name: plane.unbind(0) for name, plane in cache.items()}
        delta: Tensor | None = None
        for index, layer in enumerate(self.layers):
            layer_planes = {name: plane[index] for name, plane in planes.items()}
            x = _normed(delta, residual, layer.input_norm, eps)
            delta = layer.attention.forward(x, step, plan, self._rotations, layer_planes)
            x = add_rms_norm(delta, residual, layer.post_attention_norm, eps)
            delta = layer.mlp.forward(x, step)
            self.on_layer()
        return _normed(delta, residual, self.norm, eps)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[N, hidden] after the final norm -> float32 [N, vocab], in `out` where it is given."""
        if out is None:
            out = torch.empty(hidden.shape[0], self.config.vocab_size, dtype=torch.float32, device=hidden.device)
        self.lm_head.logits(hidden, out)
        return out

    def _load_layer(self, checkpoint: Checkpoint, layer: int) -> Layer:
        config, prefix = self.config, f"model.layers.{layer}"
        mlp: FeedForward | MixtureOfExperts
        if isinstance(config, DeepseekConfig) and config.is_moe(layer):
            mlp = MixtureOfExperts.load(checkpoint, f"{prefix}.mlp", config, layer)
        else:
            sizes = config.hidden_size, config.intermediate_size
            mlp = FeedForward.load(checkpoint, f"{prefix}.mlp", *sizes, self._workspace)
        return Layer(
            input_norm=checkpoint.tensor(f"{prefix}.input_layernorm.weight", config.hidden_size),
            attention=self._attention.load(checkpoint, f"{prefix}.self_attn", self._workspace),
            post_attention_norm=checkpoint.tensor(f"{prefix}.post_attention_layernorm.weight", config.hidden_size),
            mlp=mlp,
        )


def load_gpu_model(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: str,
    positions: int | None = None,
    batch_invariant: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> GpuDecoder:
    """The model of a Hugging Face folder, as `models.load_model` takes it. Raises CheckpointError."""
    checkpoint = Checkpoint(folder, dtype=dtype, device=device, progress=progress)
    model = GpuDecoder(config, checkpoint, positions, batch_invariant)
    checkpoint.finish(ignore=unread_tensors(config))
    return model


def _attention_kind(config: ModelConfig, dtype: torch.dtype) -> AttentionKind[Any]:
    if isinstance(config, DeepseekConfig):
        return latent_attention(config, dtype)
    if isinstance(config, LlamaConfig):
        return grouped_attention(config, dtype)
    raise TypeError(f"no model on a GPU takes a {type(config).__name__}")


def _normed(delta: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    if delta is None:
        return rms_norm(residual, weight, eps)
    return add_rms_norm(delta, residual, weight, eps)
