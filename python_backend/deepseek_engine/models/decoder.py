"""The decoder that every family shares: embedding, layers of attention and feed-forward, norm and head."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from deepseek_engine.batch import Batch
from deepseek_engine.cache_spec import Cache, CacheSpec, LayerCache
from deepseek_engine.kernels import rope
from deepseek_engine.kernels.attention_plan import AttentionPlan, attention_plan
from deepseek_engine.kernels.linear import input_major, linear, packed
from deepseek_engine.kernels.rms_norm import rms_norm
from deepseek_engine.models.config import ModelConfig
from deepseek_engine.models.rope_frequencies import rope_frequencies, rotation_factor
from deepseek_engine.models.weights import Checkpoint


class Attention(Protocol):
    """x is the normalised residual; both [T, hidden]. Returns the residual with the layer's output added."""

    def forward(
        self, x: Tensor, residual: Tensor, rotation: Tensor, plan: AttentionPlan, cache: LayerCache
    ) -> Tensor: ...


class Mlp(Protocol):
    """As Attention."""

    def forward(self, x: Tensor, residual: Tensor) -> Tensor: ...


@dataclass(slots=True)
class DecoderLayer:
    """One layer; the norms are weights [hidden]."""

    input_norm: Tensor
    attention: Attention
    post_attention_norm: Tensor
    mlp: Mlp


class Decoder:
    """A causal language model over a paged cache."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        *,
        load_layer: Callable[[str, int], tuple[Attention, Mlp]],
        rotary_dim: int,
        cache_spec: CacheSpec,
    ) -> None:
        """`load_layer` gets the layer's name prefix and index. Raises CheckpointError."""
        self.config = config
        self._cache_spec = cache_spec
        # Called after each layer: a long prompt on a slow machine is no hang.
        self.on_layer: Callable[[], None] = lambda: None
        self._dtype = checkpoint.dtype
        vocabulary = (config.vocab_size, config.hidden_size)
        self.embedding = checkpoint.tensor("model.embed_tokens.weight", *vocabulary)
        self.layers = [_load_layer(checkpoint, config, layer, load_layer) for layer in range(config.num_hidden_layers)]
        self.norm = checkpoint.tensor("model.norm.weight", config.hidden_size)
        tied = config.tie_word_embeddings
        lm_head = self.embedding if tied else checkpoint.tensor("lm_head.weight", *vocabulary)
        self.lm_head = packed(input_major(lm_head))
        self._inv_freq = rope_frequencies(config.rope, rotary_dim).to(checkpoint.device)
        self._rotation_factor = rotation_factor(config.rope)

    def cache_spec(self) -> CacheSpec:
        return self._cache_spec

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: Cache) -> Tensor:
        """Run the batch's tokens, writing their cache entries; returns [T, hidden] after the final norm.

        Raises:
            StepGivenUpError: the batch's interrupt was set; a part of the entries is written.
        """
        eps = self.config.rms_norm_eps
        plan = attention_plan(batch, self._dtype)
        rotation = rope.rotations(batch.positions, self._inv_freq, self._rotation_factor)
        hidden = F.embedding(batch.token_ids, self.embedding)
        planes = {name: plane.unbind(0) for name, plane in cache.items()}
        for index, layer in enumerate(self.layers):
            layer_cache = {name: plane[index] for name, plane in planes.items()}
            normed = rms_norm(hidden, layer.input_norm, eps)
            hidden = layer.attention.forward(normed, hidden, rotation, plan, layer_cache)
            batch.check()
            hidden = layer.mlp.forward(rms_norm(hidden, layer.post_attention_norm, eps), hidden)
            self.on_layer()
            batch.check()
        return rms_norm(hidden, self.norm, eps)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] after the final norm -> float32 [N, vocab]."""
        return linear(hidden, self.lm_head).float()


def _load_layer(
    checkpoint: Checkpoint, config: ModelConfig, layer: int, load: Callable[[str, int], tuple[Attention, Mlp]]
) -> DecoderLayer:
    prefix = f"model.layers.{layer}"
    attention, mlp = load(prefix, layer)
    return DecoderLayer(
        input_norm=checkpoint.tensor(f"{prefix}.input_layernorm.weight", config.hidden_size),
        attention=attention,
        post_attention_norm=checkpoint.tensor(f"{prefix}.post_attention_layernorm.weight", config.hidden_size),
        mlp=mlp,
    )
