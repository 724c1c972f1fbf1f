"""The attention layer of Llama, Qwen2 and Qwen3."""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepseek_engine.cache_spec import LayerCache
from deepseek_engine.kernels import rope
from deepseek_engine.kernels.attention_plan import AttentionPlan
from deepseek_engine.kernels.linear import Weight, add_linear, input_major, linear, packed
from deepseek_engine.kernels.paged_attention import paged_attention
from deepseek_engine.kernels.rms_norm import rms_norm
from deepseek_engine.models.config import LlamaConfig
from deepseek_engine.models.weights import Checkpoint


@dataclass(slots=True)
class GroupedAttention:
    """Grouped-query attention, with bias on q, k and v (Qwen2) or a norm on each query and key head (Qwen3)."""

    config: LlamaConfig
    qkv: Weight
    """[hidden, (H + 2 * K) * d]; the columns of q and k are ordered so that rotary pairs lie together."""
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    proj_out: Weight
    """[H * d, hidden]."""
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
            qkv=packed(input_major(*_ordered(weights, pairs))),
            qkv_bias=torch.cat(_ordered(biases, pairs)) if biases else None,
            q_norm=norms[0] if norms else None,
            k_norm=norms[1] if norms else None,
            proj_out=packed(input_major(checkpoint.tensor(f"{prefix}.o_proj.weight", hidden, heads["q_proj"] * d))),
            proj_out_bias=proj_out_bias,
        )

    def forward(self, x: Tensor, residual: Tensor, rotation: Tensor, plan: AttentionPlan, cache: LayerCache) -> Tensor:
        """Writes the tokens' keys and values to the planes "k" and "v" and attends to them."""
        heads, kv_heads, d = self.config.num_attention_heads, self.config.num_key_value_heads, self.config.head_dim
        qkv = linear(x, self.qkv, self.qkv_bias).view(-1, heads + 2 * kv_heads, d)
        qk, v = qkv.narrow(1, 0, heads + kv_heads), qkv.narrow(1, heads + kv_heads, kv_heads)
        if self.q_norm is not None and self.k_norm is not None:
            eps = self.config.rms_norm_eps
            qk = torch.cat(
                (rms_norm(qk[:, :heads], self.q_norm, eps), rms_norm(qk[:, heads:], self.k_norm, eps)), dim=1
            )
        rope.rotate_pairs_(qk, rotation)
        keys = cache["k"].index_copy_(0, plan.slots, qk.narrow(1, heads, kv_heads).flatten(1))
        values = cache["v"].index_copy_(0, plan.slots, v.flatten(1))
        mixed = paged_attention(qk.narrow(1, 0, heads), keys, values, plan, d**-0.5)
        if self.proj_out_bias is not None:
            residual = residual + self.proj_out_bias
        return add_linear(residual, mixed, self.proj_out)


def _ordered(parts: dict[str, Tensor], pairs: Tensor) -> list[Tensor]:
    """The rows of q, k and v, each head of q and k re-ordered by `pairs`."""
    d = pairs.shape[0]
    ordered = [parts[name].unflatten(0, (-1, d))[:, pairs].flatten(0, 1) for name in ("q_proj", "k_proj")]
    return [*ordered, parts["v_proj"]]
