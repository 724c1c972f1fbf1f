"""DeepSeek's multi-head latent attention layer on a GPU."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from deepseek_engine.cache_spec import LayerCache
from deepseek_engine.gpu.attention import AttentionKind
from deepseek_engine.gpu.device_step import DeviceStep, PrefillGroup
from deepseek_engine.gpu.product import Product, fixed_product
from deepseek_engine.kernels.head_gemm_triton import head_gemm
from deepseek_engine.kernels.mla_decode_triton import DecodePlan, decode_plan, mla_decode
from deepseek_engine.kernels.mla_prefill_triton import merge_attention, mla_prefill
from deepseek_engine.kernels.rms_norm_triton import rms_norm
from deepseek_engine.kernels.rope_cache_triton import rope_cache
from deepseek_engine.kernels.small_gemm_triton import Workspace
from deepseek_engine.models.config import DeepseekConfig
from deepseek_engine.models.latent_attention import LATENT_NORM_EPS, softmax_scale
from deepseek_engine.models.weights import Checkpoint


def latent_attention(config: DeepseekConfig, dtype: torch.dtype) -> AttentionKind[DecodePlan]:
    """Multi-head latent attention over the plane "latent"."""
    return AttentionKind(
        rotary_dim=config.qk_rope_head_dim,
        planes={"latent": config.kv_lora_rank + config.qk_rope_head_dim},
        expands=True,
        plan=partial(_plan, config, dtype),
        load=partial(LatentAttention.load, config),
    )


def _plan(config: DeepseekConfig, dtype: torch.dtype, step: DeviceStep, fixed_tokens: int) -> DecodePlan:
    return decode_plan(
        step.lengths,
        step.query_starts,
        step.tables,
        page=step.block_size,
        heads=config.num_attention_heads,
        rank=config.kv_lora_rank,
        rotary=config.qk_rope_head_dim,
        dtype=dtype,
        max_queries=step.max_queries,
        table_rows=step.table_rows,
        fixed_tokens=fixed_tokens,
    )


@dataclass(slots=True)
class LatentAttention:
    """Attention whose cache holds one latent and one rotated key a token."""

    config: DeepseekConfig
    scale: float
    proj_in: Product
    """To q_lora or H * (nope + rope), then kv_lora + rope: what reads the hidden state, as one product."""
    q_norm: Tensor | None
    q_b: Product | None
    kv_norm: Tensor
    kv_b: Tensor
    """[H, nope + v, kv_lora]."""
    proj_out: Product
    fixed: bool = False
    """Whether sums are to have one order whatever else is in the batch."""

    @classmethod
    def load(
        cls, config: DeepseekConfig, checkpoint: Checkpoint, prefix: str, workspace: Workspace
    ) -> "LatentAttention":
        heads, hidden, rank = config.num_attention_heads, config.hidden_size, config.kv_lora_rank
        width, q_rank = config.qk_nope_head_dim + config.qk_rope_head_dim, config.q_lora_rank
        kv_rows = config.qk_nope_head_dim + config.v_head_dim
        inputs = [("q_a_proj", q_rank) if q_rank else ("q_proj", heads * width)]
        inputs.append(("kv_a_proj_with_mqa", rank + config.qk_rope_head_dim))
        weights = [checkpoint.tensor(f"{prefix}.{name}.weight", rows, hidden) for name, rows in inputs]
        bias = out_bias = None
        if config.attention_bias:
            # q_proj has none even then.
            bias = torch.cat(
                [
                    checkpoint.tensor(f"{prefix}.{name}.bias", rows) if name != "q_proj" else weights[0].new_zeros(rows)
                    for name, rows in inputs
                ]
            )
            out_bias = checkpoint.tensor(f"{prefix}.o_proj.bias", hidden)
        q_b = checkpoint.tensor(f"{prefix}.q_b_proj.weight", heads * width, q_rank) if q_rank else None
        out = checkpoint.tensor(f"{prefix}.o_proj.weight", hidden, heads * config.v_head_dim)
        return cls(
            config=config,
            scale=softmax_scale(config),
            proj_in=Product(torch.cat(weights), workspace, bias),
            q_norm=checkpoint.tensor(f"{prefix}.q_a_layernorm.weight", q_rank) if q_rank else None,
            q_b=Product(q_b, workspace) if q_b is not None else None,
            kv_norm=checkpoint.tensor(f"{prefix}.kv_a_layernorm.weight", rank),
            kv_b=checkpoint.tensor(f"{prefix}.kv_b_proj.weight", heads * kv_rows, rank).view(heads, kv_rows, rank),
            proj_out=Product(out, workspace, out_bias),
        )

    def fix(self) -> None:
        """Have each row's result depend on nothing else in the batch."""
        self.fixed = True
        for product in filter(None, (self.proj_in, self.q_b, self.proj_out)):
            product.fixed = True

    def forward(
        self, x: Tensor, step: DeviceStep, plan: DecodePlan | None, rotations: Tensor, planes: LayerCache
    ) -> Tensor:
        """As `Attention.forward`; the plane is [slots, kv_lora + rope]."""
        config, plane = self.config, planes["latent"]
        rank, nope, rotary, heads = (
            config.kv_lora_rank,
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
            config.num_attention_heads,
        )
        projected = self.proj_in(x)
        q_width = projected.shape[1] - rank - rotary
        q, latent = projected.narrow(1, 0, q_width), projected.narrow(1, q_width, rank + rotary)
        if self.q_b is not None and self.q_norm is not None:
            q = self.q_b(rms_norm(q, self.q_norm, LATENT_NORM_EPS))
        q = q.unflatten(1, (heads, nope + rotary))
        q_pe = q.narrow(2, nope, rotary)
        # The decode kernel wants heads at one stride; longer rows want their queries whole.
        target = q_pe if step.prefill else q_pe.new_empty(q_pe.shape)
        rope_cache(
            q_pe, latent, self.kv_norm, LATENT_NORM_EPS, rotations, step.positions, step.slots, plane, out=target
        )
        if not step.prefill:
            return self.proj_out(self._decode(q, target, plan, plane))
        mixed = q.new_empty(q.shape[0], heads * config.v_head_dim)
        if step.num_decoded:
            few = slice(0, step.num_decoded)
            mixed[few] = self._decode(q[few], q_pe[few].contiguous(), plan, plane)
        for group in step.prefill:
            mixed[group.tokens] = self._expanded(q[group.tokens], group, plane)
        return self.proj_out(mixed)

    def _decode(self, q: Tensor, q_pe: Tensor, plan: DecodePlan | None, plane: Tensor) -> Tensor:
        assert plan is not None
        nope = self.config.qk_nope_head_dim
        absorbed = head_gemm(q.narrow(2, 0, nope), self.kv_b.narrow(1, 0, nope), by_column=False, fixed=self.fixed)
        mixed, _ = mla_decode(absorbed, q_pe, plane, plan, self.scale)
        values = self.kv_b.narrow(1, nope, self.config.v_head_dim)
        return head_gemm(mixed, values, by_column=True, fixed=self.fixed).flatten(1)

    def _expanded(self, q: Tensor, group: PrefillGroup, plane: Tensor) -> Tensor:
        heads, both, rank = self.kv_b.shape
        out: Tensor | None = None
        lse: Tensor | None = None
        for chunk in group.chunks:
            entries = plane.index_select(0, chunk.slots)
            latents, weight = entries.narrow(1, 0, rank), self.kv_b.view(heads * both, rank)
            kv = fixed_product(latents, weight) if self.fixed else torch.mm(latents, weight.t())
            other, other_lse = mla_prefill(
                q,
                kv.view(-1, heads, both),
                entries.narrow(1, rank, entries.shape[1] - rank),
                group.query_starts,
                chunk.key_starts,
                longest=group.longest,
                value_width=self.config.v_head_dim,
                scale=self.scale,
                causal=chunk.causal,
            )
            if out is None or lse is None:
                out, lse = other, other_lse
            else:
                merge_attention(out, lse, other, other_lse)
        assert out is not None
        return out.flatten(1)
