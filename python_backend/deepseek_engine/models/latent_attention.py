"""DeepSeek's multi-head latent attention layer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepseek_engine.cache_spec import LayerCache
from deepseek_engine.kernels import rope
from deepseek_engine.kernels.attention_plan import AttentionPlan
from deepseek_engine.kernels.linear import Weight, add_linear, input_major, linear, packed
from deepseek_engine.kernels.mla_attention import mla_attention, mla_decode
from deepseek_engine.kernels.rms_norm import SegmentNorm
from deepseek_engine.models.config import DeepseekConfig
from deepseek_engine.models.rope_frequencies import yarn_mscale
from deepseek_engine.models.weights import Checkpoint

LATENT_NORM_EPS = 1e-6
"""Of the two latent norms, whatever rms_norm_eps says: DeepSeek's code never hands it to them."""

ABSORBED_BYTES = 512 * 1024
"""How much more a layer may read for its absorbed projections: as long as the operator calls they save would take."""


def softmax_scale(config: DeepseekConfig) -> float:
    """qk_head_dim^-1/2, times m(factor, mscale_all_dim)^2 under YaRN."""
    scale = float(config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    if config.rope.rope_type == "yarn" and config.rope.mscale_all_dim:
        return scale * yarn_mscale(config.rope.factor, config.rope.mscale_all_dim) ** 2
    return scale


@dataclass(slots=True)
class LatentAttention:
    """Attention whose cache holds one latent and one rotated key a token."""

    config: DeepseekConfig
    scale: float
    proj_in: Weight
    """[hidden, (q_lora or H * (nope + rope)) + kv_lora + rope]: what reads the hidden state, as one product."""
    proj_in_bias: Tensor | None
    norm: SegmentNorm
    """Of proj_in's q_lora and kv_lora columns."""
    q_b: Weight | None
    """[q_lora, H * (nope + rope)]; None for a model without query compression."""
    kv_b: Tensor
    """[H, nope + v, kv_lora]."""
    proj_out: Weight
    """[H * v, hidden]."""
    proj_out_bias: Tensor | None
    absorbed: "AbsorbedProjections | None"

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, config: DeepseekConfig) -> "LatentAttention":
        heads, hidden, rank = config.num_attention_heads, config.hidden_size, config.kv_lora_rank
        width, q_rank = config.qk_nope_head_dim + config.qk_rope_head_dim, config.q_lora_rank
        kv_b_rows = config.qk_nope_head_dim + config.v_head_dim
        q_in = ("q_a_proj", q_rank) if q_rank else ("q_proj", heads * width)
        kv_in = ("kv_a_proj_with_mqa", rank + config.qk_rope_head_dim)
        weights = [checkpoint.tensor(f"{prefix}.{name}.weight", rows, hidden) for name, rows in (q_in, kv_in)]
        biases = [torch.zeros(0)]
        proj_out_bias = None
        if config.attention_bias:
            biases = [_bias(checkpoint, prefix, *q_in, present=bool(q_rank)), _bias(checkpoint, prefix, *kv_in)]
            proj_out_bias = checkpoint.tensor(f"{prefix}.o_proj.bias", hidden)
        q_b = input_major(checkpoint.tensor(f"{prefix}.q_b_proj.weight", heads * width, q_rank)) if q_rank else None
        kv_norm = checkpoint.tensor(f"{prefix}.kv_a_layernorm.weight", rank)
        norms = [(q_in[1], kv_norm)]
        if q_rank:
            norms.append((0, checkpoint.tensor(f"{prefix}.q_a_layernorm.weight", q_rank)))
        kv_b = checkpoint.tensor(f"{prefix}.kv_b_proj.weight", heads * kv_b_rows, rank).view(heads, kv_b_rows, rank)
        proj_out = input_major(checkpoint.tensor(f"{prefix}.o_proj.weight", hidden, heads * config.v_head_dim))
        return cls(
            config=config,
            scale=softmax_scale(config),
            proj_in=packed(input_major(*weights)),
            proj_in_bias=torch.cat(biases) if config.attention_bias else None,
            norm=SegmentNorm.over(q_in[1] + kv_in[1], norms, LATENT_NORM_EPS),
            q_b=packed(q_b) if q_b is not None else None,
            kv_b=kv_b,
            proj_out=packed(proj_out),
            proj_out_bias=proj_out_bias,
            absorbed=AbsorbedProjections.of(q_b, kv_b, proj_out, config.qk_nope_head_dim),
        )

    def forward(self, x: Tensor, residual: Tensor, rotation: Tensor, plan: AttentionPlan, cache: LayerCache) -> Tensor:
        """Writes the tokens' entries to the plane "latent" and attends to it."""
        config = self.config
        rank, nope, rotary = config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim
        projected = self.norm.forward(linear(x, self.proj_in, self.proj_in_bias))
        q_width = projected.shape[1] - rank - rotary
        rope.rotate_pairs_(projected.narrow(1, q_width + rank, rotary).unsqueeze(1), rotation)
        latents = cache["latent"].index_copy_(0, plan.slots, projected.narrow(1, q_width, rank + rotary))
        q = projected.narrow(1, 0, q_width)
        if self.proj_out_bias is not None:
            residual = residual + self.proj_out_bias
        if self.absorbed is not None and plan.single is not None:
            query = linear(q, self.absorbed.query).view(-1, config.num_attention_heads, rank + rotary)
            rope.rotate_pairs_(query.narrow(2, rank, rotary), rotation)
            mixed = mla_decode(query, latents, plan.single, self.scale, rank)
            return torch.addmm(residual, mixed.view(-1, self.absorbed.out.shape[0]), self.absorbed.out)
        if self.q_b is not None:
            q = linear(q, self.q_b)
        q = q.view(-1, config.num_attention_heads, nope + rotary)
        rope.rotate_pairs_(q.narrow(2, nope, rotary), rotation)
        mixed = mla_attention(q, latents, self.kv_b, plan, self.scale, nope)
        return add_linear(residual, mixed, self.proj_out)


@dataclass(slots=True)
class AbsorbedProjections:
    """W_UK folded into the query's projection and W_UV into the output's, for decoding.

    Worth it in a small model, whose steps are bound by the number of operator calls; in a large one the products are
    several times larger than their factors.
    """

    query: Tensor
    """[q_lora, H * (kv_lora + rope)]."""
    out: Tensor
    """[H * kv_lora, hidden]."""

    @classmethod
    def of(cls, q_b: Tensor | None, kv_b: Tensor, proj_out: Tensor, nope: int) -> "AbsorbedProjections | None":
        """None where it does not pay, or would round twice: the products are made in float64 and kept in float32."""
        if q_b is None or q_b.dtype != torch.float32:
            return None
        heads, rank, hidden = kv_b.shape[0], kv_b.shape[2], proj_out.shape[1]
        rotary = q_b.shape[1] // heads - nope
        size = q_b.shape[0] * heads * (rank + rotary) + heads * rank * hidden
        if 4 * (size - q_b.numel() - kv_b.numel() - proj_out.numel()) > ABSORBED_BYTES:
            return None
        q_nope, q_pe = q_b.double().view(-1, heads, nope + rotary).split((nope, rotary), dim=-1)
        w_uk, w_uv = kv_b.double().split((nope, kv_b.shape[1] - nope), dim=1)
        query = torch.cat((torch.einsum("qhn,hnc->qhc", q_nope, w_uk), q_pe), dim=-1)
        out = torch.einsum("hvc,hvd->hcd", w_uv, proj_out.double().view(heads, -1, hidden))
        return cls(query=query.flatten(1).float().contiguous(), out=out.flatten(0, 1).float().contiguous())


def _bias(checkpoint: Checkpoint, prefix: str, name: str, rows: int, present: bool = True) -> Tensor:
    """q_proj has no bias even where attention_bias is set; zeros stand in for it."""
    if present:
        return checkpoint.tensor(f"{prefix}.{name}.bias", rows)
    return torch.zeros(rows, dtype=checkpoint.dtype, device=checkpoint.device)
