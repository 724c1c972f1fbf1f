"""The attention layer of Llama, Qwen2 and Qwen3."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deepseek_engine.cache_spec import Cache
from deepseek_engine.kernels import rope
from deepseek_engine.kernels.attention_plan import AttentionPlan
from deepseek_engine.kernels.paged_attention import paged_attention
from deepseek_engine.kernels.rms_norm import rms_norm
from deepseek_engine.models.config import LlamaConfig
from deepseek_engine.models.weights import Checkpoint


@dataclass(slots=True)
class GroupedAttention:
    """Grouped-query attention, with bias on q, k and v (Qwen2) or a norm on each query and key head (Qwen3)."""

    config: LlamaConfig
    qkv: Tensor
    """[(H + 2 * K) * d, hidden]; the rows of q and k are ordered so that rotary pairs lie together."""
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    proj_out: Tensor
    proj_out_bias: Tensor | None

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, config: LlamaConfig) -> "GroupedAttention":
        hidden, d = config.hidden_size, config.head_dim
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        heads["v_proj"] = config.num_key_value_heads
        weights = {name: checkpoint.tensor(f"{prefix}.{name}.weight", n * d, hidden) for name, n in heads.items()}
        biases = None
        if config.qkv_bias:
            biases = {name: checkpoint.tensor(f"{prefix}.{name}.bias", n * d) for name, n in heads.items()}
        pairs = rope.interleaving(d)
        norms = None
        if config.qk_norm:
            norms = [checkpoint.tensor(f"{prefix}.{name}.weight", d)[pairs] for name in ("q_norm", "k_norm")]
        proj_out_bias = checkpoint.tensor(f"{prefix}.o_proj.bias", hidden) if config.attention_bias else None
        return cls(
            config=config,
            qkv=_joined(weights, pairs),
            qkv_bias=_joined(biases, pairs) if biases else None,
            q_norm=norms[0] if norms else None,
            k_norm=norms[1] if norms else None,
            proj_out=checkpoint.tensor(f"{prefix}.o_proj.weight", hidden, heads["q_proj"] * d),
            proj_out_bias=proj_out_bias,
        )

    def forward(self, x: Tensor, rotation: Tensor, plan: AttentionPlan, cache: Cache, layer: int) -> Tensor:
        """x [T, hidden]; writes the tokens' keys and values to the planes "k" and "v" and attends to them."""
        heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        qkv = F.linear(x, self.qkv, self.qkv_bias).unflatten(-1, (-1, self.config.head_dim))
        qk, v = qkv.split((heads + kv_heads, kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            eps = self.config.rms_norm_eps
            qk = torch.cat(
                (rms_norm(qk[:, :heads], self.q_norm, eps), rms_norm(qk[:, heads:], self.k_norm, eps)), dim=1
            )
        q, k = rope.rotate_pairs(qk, rotation).split((heads, kv_heads), dim=1)
        keys, values = (
            cache[name][layer].index_copy_(0, plan.slots, entry.flatten(1).to(cache[name].dtype))
            for name, entry in (("k", k), ("v", v))
        )
        mixed = paged_attention(q, keys, values, plan, self.config.head_dim**-0.5)
        return F.linear(mixed, self.proj_out, self.proj_out_bias)


def _joined(parts: dict[str, Tensor], pairs: Tensor) -> Tensor:
    """q, k and v rows as one, each head of q and k re-ordered by `pairs`."""
    d = pairs.shape[0]
    ordered = [parts[name].unflatten(0, (-1, d))[:, pairs].flatten(0, 1) for name in ("q_proj", "k_proj")]
    return torch.cat((*ordered, parts["v_proj"]))
