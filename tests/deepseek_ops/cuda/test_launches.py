"""The C++ operators launch what the engine's Python launcher would for the same shapes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_cases import (
    SMALL_CASES,
    V2_LITE,
    V3,
    CudaCase,
    Groups,
    Maker,
    Numbers,
    attention_case,
    experts_case,
    experts_int4_case,
    fp8_case,
    gate_case,
    grouped_case,
    int4_case,
    norm_case,
    product_case,
)
from deepseek_engine.kernels import launcher
from deepseek_engine.kernels.fp8_block_gemm_triton import fp8_block_gemm
from deepseek_engine.kernels.grouped_decode_triton import grouped_decode, grouped_decode_plan
from deepseek_engine.kernels.grouped_prefill_triton import grouped_prefill
from deepseek_engine.kernels.grouped_rope_triton import grouped_rope_cache
from deepseek_engine.kernels.head_gemm_triton import head_gemm
from deepseek_engine.kernels.int4_gemm_triton import int4_gemm
from deepseek_engine.kernels.mla_decode_triton import MAX_QUERIES, decode_plan, mla_decode
from deepseek_engine.kernels.mla_prefill_triton import mla_prefill
from deepseek_engine.kernels.moe_gate_triton import moe_gate
from deepseek_engine.kernels.moe_int4_triton import PackedExperts, moe_experts_int4
from deepseek_engine.kernels.moe_triton import moe_experts
from deepseek_engine.kernels.paged_gather_triton import gather_entries
from deepseek_engine.kernels.rms_norm_triton import add_rms_norm, rms_norm
from deepseek_engine.kernels.rope_cache_triton import rope_cache
from deepseek_engine.kernels.rotary_triton import rotary
from deepseek_engine.kernels.small_gemm_triton import Workspace, small_gemm
from deepseek_engine.kernels.step_inputs_triton import embed
from deepseek_engine.kernels.swiglu_triton import swiglu
from deepseek_engine.kernels.variants import Kernel, Variant
from deepseek_ops.registry import CPU, CUDA
from fake_cuda import UNPACKED_BYTES, FakeCuda
from one_node import OneNode
from torch import Tensor

Python = tuple[str, str, tuple[int, int, int], dict[str, int | float]]
WIDE: tuple[Maker, ...] = (
    norm_case(7, 2048, residual=True, sums=True),
    product_case(1, 2048, 576),
    int4_case(7, 128, 9000),
    int4_case(40, 128, 3000),
    int4_case(40, 64, 9000),
    int4_case(1, 64, 17000),
    fp8_case(7, 128, 9000),
    fp8_case(40, 128, 3000),
    fp8_case(40, 64, 9000),
    gate_case("v2_lite", 1, 256),
    gate_case("v3", 70, 256),
    experts_case(1, 256, 128, 66, 8),
    experts_case(9, 256, 128, 66, 8),
    experts_case(300, 64, 32, 8, 2),
    experts_int4_case(300, 64, 32, 8, 2),
    attention_case(V2_LITE, [(1, 100), (1, 3)], padded=2),
    attention_case(V2_LITE, [(4, 70)], page=32),
    attention_case(V3, [(1, 65)]),
    attention_case(V3, [(1, 65)], page=32),
    grouped_case(Groups(32, 8, 128), [(1, 100), (1, 3)], padded=2),
    grouped_case(Groups(28, 4, 128, normed=True), [(4, 30), (9, 40)], page=32),
)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Python]:
    """What the Python launcher is asked for, on a device as the fake one."""
    found: list[Python] = []

    def launch(kernel: Kernel, row: Variant, blocks: tuple[int, int, int], given: Mapping[str, Any]) -> None:
        numbers = {name: given[name] for name, kind in kernel.signature.items() if not kind.startswith("*")}
        found.append((kernel.name, row.name, blocks, numbers))

    monkeypatch.setattr(launcher, "launch", launch)
    monkeypatch.setattr(launcher, "capability", lambda device: 90)
    monkeypatch.setattr(launcher, "multiprocessors", lambda device: 3)
    monkeypatch.setattr("deepseek_engine.kernels.unpacked_product.UNPACKED_BYTES", UNPACKED_BYTES)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make", [*SMALL_CASES, *WIDE])
def test_launches_are_those_of_the_python_launcher(
    named_library: Path, cuda: FakeCuda, recorded: list[Python], make: Maker, dtype: torch.dtype
) -> None:
    case = make(Numbers(dtype, 0))
    node = OneNode(
        named_library,
        case.operator,
        case.inputs,
        case.attributes,
        constant=case.constant,
        outputs=list(case.expected),
        provider=CUDA,
        runs_on=CPU,
    )
    node.run(case.inputs)
    _PYTHON[case.operator](case)
    assert len(cuda.launches) == len(recorded)
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    for launch, (kernel, row, blocks, numbers) in zip(sorted_by_kernel(cuda), sorted(recorded), strict=True):
        assert (launch.kernel.name, launch.row.name, launch.grid) == (kernel, row, blocks)
        assert launch.dtype == (name if launch.kernel.is_typed else "bf16")
        assert launch.threads == 32 * launch.row.num_warps
        # These read the weight before they follow, and do not where it is none of the session's.
        assert launch.chained == launch.kernel.chained or "gemv" in launch.kernel.name or kernel == "int4_rows"
        for argument, value in numbers.items():
            if argument not in _STRIDES_OF_THEIR_OWN.get(kernel, ()):
                assert launch.arguments[argument] == pytest.approx(value, rel=1e-6), (kernel, argument)


def sorted_by_kernel(cuda: FakeCuda) -> list[Any]:
    def key(launch: Any) -> Python:
        numbers = {name: launch.arguments[name] for name, kind in launch.kernel.signature.items() if kind[0] != "*"}
        return launch.kernel.name, launch.row.name, launch.grid, numbers

    return sorted(cuda.launches, key=lambda launch: key(launch)[:3])


_STRIDES_OF_THEIR_OWN = {"row_gemv": ("eps",), "row_gemv_fp32": ("eps",)}


def _norm(case: CudaCase) -> None:
    x, weight, heads = case.inputs["x"], case.inputs["weight"], case.attributes["num_heads"]
    if "residual" in case.inputs:
        add_rms_norm(x, case.inputs["residual"].clone(), weight, case.attributes["epsilon"])
    else:
        rms_norm(x.view(-1, x.shape[1] // heads), weight, case.attributes["epsilon"])


def _rotary(case: CudaCase) -> None:
    given = case.attributes
    rotary(
        case.inputs["x"].unflatten(1, (given["num_heads"], -1)),
        case.inputs["positions"],
        case.inputs["inv_freq"],
        scale=given["scale"],
        interleaved=bool(given["interleaved"]),
    )


def _product(case: CudaCase) -> None:
    x, weight = case.inputs["x"], case.inputs["weight"]
    added = [case.inputs[name] for name in ("bias", "residual") if name in case.inputs]
    if x.shape[0] == 1 and len(added) < 2:
        wide = torch.float32 if case.operator == "DeepSeekLogits" else None
        residual = added[0].view(1, -1) if added else None
        small_gemm(x, weight, Workspace.reserve(4096, x.device), residual=residual, out_dtype=wide)


def _gate(case: CudaCase) -> None:
    given = case.attributes
    moe_gate(
        case.inputs["x"],
        case.inputs["weight"],
        case.inputs.get("bias"),
        method=given["topk_method"],
        top_k=given["num_experts_per_tok"],
        groups=given["n_group"],
        topk_groups=given["topk_group"],
        normalize=bool(given["norm_topk_prob"]),
        scaling=given["routed_scaling_factor"],
        shared=given["n_shared_experts"],
        slots=case.inputs.get("slots"),
    )


def _packed_experts(case: CudaCase) -> None:
    stacks = (
        PackedExperts(case.inputs[name], case.inputs[f"{name}_scales"], case.inputs.get(f"{name}_zeros"))
        for name in ("gate_up", "down")
    )
    moe_experts_int4(*(case.inputs[name] for name in ("x", "weights", "experts")), *stacks, **case.attributes)


def _attention(case: CudaCase) -> None:
    inputs, given = case.inputs, case.attributes
    heads, nope, rope, v = (given[n] for n in ("num_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    if int(inputs["host_batch"][:, 0].max()) > MAX_QUERIES:
        _prompts(case)
        return
    q = inputs["q"].unflatten(1, (heads, nope + rope))
    q_pe = q.narrow(2, nope, rope)
    rank, page = inputs["latent_norm"].shape[0], inputs["cache"].shape[1]
    plane = inputs["cache"].view(-1, rank + rope)
    kv_b = inputs["kv_b"].view(heads, nope + v, rank)
    target = q_pe.new_empty(q_pe.shape)
    rope_cache(
        q_pe,
        inputs["entries"],
        inputs["latent_norm"],
        given["latent_epsilon"],
        inputs["rotations"],
        inputs["positions"],
        inputs["slots"],
        plane,
        interleaved=bool(given["interleaved"]),
        out=target,
    )
    plan = decode_plan(
        inputs["context_lengths"],
        inputs["query_starts"],
        inputs["block_tables"],
        page=page,
        heads=heads,
        rank=rank,
        rotary=rope,
        dtype=case.dtype,
        max_queries=int(inputs["host_batch"][:, 0].max()),
        table_rows=inputs["table_rows"],
    )
    mixed: Tensor = head_gemm(q.narrow(2, 0, nope), kv_b.narrow(1, 0, nope), by_column=False)
    mixed, _ = mla_decode(mixed, target, plane, plan, given["scale"])
    head_gemm(mixed, kv_b.narrow(1, nope, v), by_column=True)


def _prompts(case: CudaCase) -> None:
    """Prompts alone, in one group of one chunk."""
    inputs, given = case.inputs, case.attributes
    heads, nope, rope, v = (given[n] for n in ("num_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    rank, page = inputs["latent_norm"].shape[0], inputs["cache"].shape[1]
    lengths, counts = inputs["context_lengths"], inputs["host_batch"][:, 0]
    if int(lengths.sum()) > EXPANDED_AT_ONCE or int(counts.min()) <= MAX_QUERIES:
        pytest.skip("the engine's groups of prompts are larger")
    q = inputs["q"].unflatten(1, (heads, nope + rope))
    plane = inputs["cache"].view(-1, rank + rope)
    rope_cache(
        q.narrow(2, nope, rope),
        inputs["entries"],
        inputs["latent_norm"],
        given["latent_epsilon"],
        inputs["rotations"],
        inputs["positions"],
        inputs["slots"],
        plane,
        interleaved=bool(given["interleaved"]),
    )
    key_starts = torch.tensor([0, *lengths.cumsum(0)], dtype=torch.int32)
    keys, tables = int(lengths.sum()), inputs["block_tables"]
    options = {"page": page, "keys": keys, "longest": int(lengths.max())}
    entries = gather_entries(plane, tables, inputs["table_rows"], key_starts, **options)
    mla_prefill(
        q,
        torch.zeros(keys, heads, nope + v, dtype=case.dtype),
        entries.narrow(1, rank, rope),
        inputs["query_starts"],
        key_starts,
        longest=int(counts.max()),
        value_width=v,
        scale=given["scale"],
        causal=True,
    )


def _grouped(case: CudaCase) -> None:
    inputs, given = case.inputs, case.attributes
    heads, key_heads, width = given["num_heads"], given["num_key_value_heads"], given["head_dim"]
    page = inputs["key_cache"].shape[1]
    q, k, v = (inputs[name].unflatten(1, (-1, width)) for name in ("q", "k", "v"))
    keys, values = (inputs[name].view(-1, key_heads * width) for name in ("key_cache", "value_cache"))
    norms = (inputs["q_norm"], inputs["k_norm"]) if "q_norm" in inputs else None
    grouped_rope_cache(
        q,
        k,
        v,
        inputs["rotations"],
        inputs["positions"],
        inputs["slots"],
        keys,
        values,
        norms=norms,
        eps=given["norm_epsilon"],
        interleaved=bool(given["interleaved"]),
    )
    counts = inputs["host_batch"][:, 0].tolist()
    few = next((place for place, count in enumerate(counts) if count > MAX_QUERIES), len(counts))
    batch = [inputs[name] for name in ("context_lengths", "query_starts", "block_tables")]
    if few:
        plan = grouped_decode_plan(
            batch[0][:few],
            batch[1],
            batch[2],
            page=page,
            heads=heads,
            key_heads=key_heads,
            width=width,
            dtype=case.dtype,
            max_queries=max(counts[:few]),
            table_rows=inputs["table_rows"][:few],
        )
        grouped_decode(q, keys, values, plan, given["scale"])
    if few < len(counts):
        options = {"page": page, "longest": max(counts[few:]), "scale": given["scale"]}
        rows = inputs["table_rows"][few:]
        grouped_prefill(q, keys, values, batch[1][few:], batch[0][few:], batch[2], table_rows=rows, **options)


EXPANDED_AT_ONCE = 32
"""Of the library with names for binaries."""

_PYTHON: Mapping[str, Any] = {
    "DeepSeekRMSNorm": _norm,
    "DeepSeekRotaryEmbedding": _rotary,
    "DeepSeekSwiGLU": lambda case: swiglu(case.inputs["gate_up"]),
    "DeepSeekMatMul": _product,
    "DeepSeekLogits": _product,
    "DeepSeekMatMulInt4": lambda case: int4_gemm(**case.inputs, **case.attributes),
    "DeepSeekMatMulFp8Block": lambda case: fp8_block_gemm(
        **case.inputs, block=(case.attributes["block_rows"], case.attributes["block_columns"])
    ),
    "DeepSeekMoEGate": _gate,
    "DeepSeekMoE": lambda case: moe_experts(
        *(case.inputs[name] for name in ("x", "weights", "experts", "gate_up", "down"))
    ),
    "DeepSeekMoEInt4": _packed_experts,
    "DeepSeekMLAPagedAttention": _attention,
    "DeepSeekPagedAttention": _grouped,
    "DeepSeekEmbedding": lambda case: embed(
        *(case.inputs[name] for name in ("token_ids", "sources", "last_tokens", "table"))
    ),
}
