"""The attention layer of Llama, Qwen2 and Qwen3 on a GPU."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from deepseek_engine.cache_spec import LayerCache
from deepseek_engine.gpu.attention import AttentionKind
from deepseek_engine.gpu.device_step import DeviceStep
from deepseek_engine.gpu.product import Product
from deepseek_engine.kernels.grouped_decode_triton import GroupedDecodePlan, grouped_decode, grouped_decode_plan
from deepseek_engine.kernels.grouped_prefill_triton import grouped_prefill
from deepseek_engine.kernels.grouped_rope_triton import grouped_rope_cache
from deepseek_engine.kernels.small_gemm_triton import Workspace
from deepseek_engine.models.config import LlamaConfig
from deepseek_engine.models.weights import Checkpoint


def grouped_attention(config: LlamaConfig, dtype: torch.dtype) -> AttentionKind[GroupedDecodePlan]:
    """Grouped-query attention over planes "k" and "v"."""
    width = config.num_key_value_heads * config.head_dim
    return AttentionKind(
        rotary_dim=config.head_dim,
        planes={"k": width, "v": width},
        expands=False,
        plan=partial(_plan, config, dtype),
        load=partial(GroupedAttention.load, config),
    )


def _plan(config: LlamaConfig, dtype: torch.dtype, step: DeviceStep, fixed_tokens: int) -> GroupedDecodePlan:
    return grouped_decode_plan(
        step.lengths,
        step.query_starts,
        step.tables,
        page=step.block_size,
        heads=config.num_attention_heads,
        key_heads=config.num_key_value_heads,
        width=config.head_dim,
        dtype=dtype,
        max_queries=step.max_queries,
        table_rows=step.table_rows,
        fixed_tokens=fixed_tokens,
    )


@dataclass(slots=True)
class GroupedAttention:
    """Grouped-query attention, with bias on q, k and v (Qwen2) or a norm on each query and key head (Qwen3)."""

    config: LlamaConfig
    qkv: Product
    """To (H + 2 K) * d; rotary pairs are half a head apart, as checkpoints have them."""
    norms: tuple[Tensor, Tensor] | None
    """[d]: of the queries and of the keys."""
    proj_out: Product

    @classmethod
    def load(cls, config: LlamaConfig, checkpoint: Checkpoint, prefix: str, workspace: Workspace) -> "GroupedAttention":
        hidden, d, heads = config.hidden_size, config.head_dim, config.num_attention_heads
        rows = {"q_proj": heads * d, "k_proj": config.num_key_value_heads * d}
        rows["v_proj"] = rows["k_proj"]
        bias = norms = None
        if config.qkv_bias:
            bias = torch.cat([checkpoint.tensor(f"{prefix}.{name}.bias", count) for name, count in rows.items()])
        if config.qk_norm:
            norms = (checkpoint.tensor(f"{prefix}.q_norm.weight", d), checkpoint.tensor(f"{prefix}.k_norm.weight", d))
        qkv = torch.cat([checkpoint.tensor(f"{prefix}.{name}.weight", n, hidden) for name, n in rows.items()])
        out = checkpoint.tensor(f"{prefix}.o_proj.weight", hidden, heads * d)
        out_bias = checkpoint.tensor(f"{prefix}.o_proj.bias", hidden) if config.attention_bias else None
        return cls(
            config=config,
            qkv=Product(qkv, workspace, bias),
            norms=norms,
            proj_out=Product(out, workspace, out_bias),
        )

    def fix(self) -> None:
        """Have each row's result depend on nothing else in the batch."""
        self.qkv.fixed = self.proj_out.fixed = True

    def forward(
        self, x: Tensor, step: DeviceStep, plan: GroupedDecodePlan | None, rotations: Tensor, planes: LayerCache
    ) -> Tensor:
        """As `Attention.forward`; planes [slots, K * d]."""
        config = self.config
        heads, key_heads, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        keys, values, scale = planes["k"], planes["v"], d**-0.5
        q, k, v = self.qkv(x).unflatten(1, (heads + 2 * key_heads, d)).split((heads, key_heads, key_heads), dim=1)
        grouped_rope_cache(
            q,
            k,
            v,
            rotations,
            step.positions,
            step.slots,
            keys,
            values,
            norms=self.norms,
            eps=config.rms_norm_eps,
            interleaved=False,
        )
        mixed = q.new_empty(q.shape)
        if step.num_decoded:
            assert plan is not None
            few = slice(0, step.num_decoded)
            grouped_decode(q[few], keys, values, plan, scale, out=mixed[few])
        for group in step.prefill:
            grouped_prefill(
                q[group.tokens],
                keys,
                values,
                group.query_starts,
                group.lengths,
                step.tables,
                page=step.block_size,
                longest=group.longest,
                scale=scale,
                table_rows=group.table_rows,
                out=mixed[group.tokens],
            )
        return self.proj_out(mixed.flatten(1))
