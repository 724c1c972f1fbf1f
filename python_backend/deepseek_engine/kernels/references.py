"""The operators' torch references, by the operator's name."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from deepseek_engine.kernels import (
    fp8_block_gemm,
    int4_gemm,
    linear,
    mla_attention,
    moe_experts,
    moe_gate,
    paged_attention,
    rms_norm,
    rope,
    swiglu,
)

REFERENCES: Mapping[str, tuple[Callable[..., Any], ...]] = MappingProxyType(
    {
        "fp8_block_gemm": (fp8_block_gemm.fp8_block_linear,),
        "int4_gemm": (int4_gemm.int4_linear,),
        "linear": (linear.linear, linear.add_linear),
        "mla_attention": (mla_attention.mla_attention, mla_attention.mla_decode),
        "moe_experts": (moe_experts.moe_experts,),
        "moe_gate": (moe_gate.greedy, moe_gate.group_limited_greedy, moe_gate.noaux_tc),
        "paged_attention": (paged_attention.paged_attention,),
        "rms_norm": (rms_norm.rms_norm, rms_norm.SegmentNorm.forward),
        "rope": (rope.rotations, rope.rotate_pairs_),
        "swiglu": (swiglu.swiglu,),
    }
)
"""What models call. One that is called within another counts as part of it."""
