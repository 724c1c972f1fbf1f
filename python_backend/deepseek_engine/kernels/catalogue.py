"""Every device kernel with its rows, and every launch plan: what a compiler or a launcher generator goes through.

Importing it imports triton.
"""

from deepseek_engine.kernels import (
    block_sparse_attention_triton,
    block_sparse_gemm_triton,
    fp8_block_gemm_triton,
    grouped_decode_triton,
    grouped_prefill_triton,
    grouped_rope_triton,
    head_gemm_triton,
    int4_gemm_triton,
    mla_decode_triton,
    mla_prefill_triton,
    moe_gate_triton,
    moe_int4_triton,
    moe_triton,
    paged_gather_triton,
    rms_norm_triton,
    rope_cache_triton,
    rotary_triton,
    sampling_triton,
    small_gemm_triton,
    split_sum_triton,
    step_inputs_triton,
    swiglu_triton,
)
from deepseek_engine.kernels.variants import LaunchPlan, Table

_MODULES = (
    head_gemm_triton,
    rms_norm_triton,
    rope_cache_triton,
    rotary_triton,
    mla_decode_triton,
    mla_prefill_triton,
    paged_gather_triton,
    grouped_rope_triton,
    grouped_decode_triton,
    grouped_prefill_triton,
    moe_gate_triton,
    moe_triton,
    moe_int4_triton,
    small_gemm_triton,
    split_sum_triton,
    int4_gemm_triton,
    fp8_block_gemm_triton,
    step_inputs_triton,
    swiglu_triton,
    sampling_triton,
    block_sparse_attention_triton,
    block_sparse_gemm_triton,
)
TABLES: tuple[Table, ...] = tuple(table for module in _MODULES for table in module.TABLES)
PLANS: tuple[LaunchPlan, ...] = tuple(plan for module in _MODULES for plan in module.PLANS)
