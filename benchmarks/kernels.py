# ruff: noqa: B023
# Every function that is made in a loop here is called in the same turn of it.
"""Checks and times the device kernels on one GPU, several rows of each, against their floors and torch.

    python benchmarks/kernels.py [--sections NAME,...] [--out FOLDER]

Every figure is a median of replays of a CUDA graph on random data. Beside it stand the bytes and operations that the
operator must at least move and do, over the card's own rates, measured in the same run. Rows that are not declared are
candidates: the best become rows of the tables. A section runs in a process of its own, started again after a crash.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepseek_engine.kernels import (
    block_masks,
    block_sparse_attention_triton,
    block_sparse_gemm_triton,
    grouped_decode_triton,
    grouped_prefill_triton,
    grouped_rope_triton,
    launcher,
    mla_decode_triton,
    mla_prefill_triton,
    moe_gate_triton,
    moe_triton,
    rms_norm_triton,
    rope,
    rope_cache_triton,
    sampling_triton,
    small_gemm_triton,
)
from deepseek_engine.kernels.block_map import BlockMap, block_map
from deepseek_engine.kernels.block_sparse_attention import block_sparse_attention
from deepseek_engine.kernels.block_sparse_gemm import block_sparse_gemm
from deepseek_engine.kernels.catalogue import TABLES
from deepseek_engine.kernels.fp8_block_gemm import fp8_block_linear
from deepseek_engine.kernels.fp8_block_gemm_triton import fp8_block_gemm
from deepseek_engine.kernels.int4_gemm import int4_linear
from deepseek_engine.kernels.int4_gemm_triton import int4_gemm
from deepseek_engine.kernels.moe_int4_triton import PackedExperts, moe_experts_int4
from deepseek_engine.kernels.tiled_mask import TiledMask, tiled_mask
from deepseek_engine.kernels.variants import AMPERE, HOPPER, Kernel, Variant

DTYPE = torch.bfloat16
DEVICE = torch.device("cuda", 0)
REPLAYS = 9


@dataclass
class Row:
    """One measurement; `floor_us` is the larger of bytes over the copy rate and operations over the matmul rate."""

    section: str
    case: str
    variant: str
    us: float
    gigabytes_per_second: float = 0.0
    teraflops: float = 0.0
    floor_us: float = 0.0
    of_floor: float = 0.0
    error: float = 0.0
    torch_error: float = 0.0
    note: str = ""


def decode_tiling(
    name: str, rows: int, tile: int, warps: int, stages: int, blocks: int = 1, transposed: bool = False
) -> mla_decode_triton.Tiling:
    return mla_decode_triton.Tiling(
        name, rows, tile, warps, stages, (HOPPER,), (1, 2**20), transposed=transposed, blocks=blocks
    )


DECODE_16 = (
    decode_tiling("t32w8s5", 16, 32, 8, 5),
    decode_tiling("t32w8s6", 16, 32, 8, 6),
    decode_tiling("t32w4s3x2", 16, 32, 4, 3, 2),
    decode_tiling("t32w8s3x2", 16, 32, 8, 3, 2),
    decode_tiling("t64w8s3", 16, 64, 8, 3),
    decode_tiling("t64w4s3", 16, 64, 4, 3),
    decode_tiling("T64w8s2", 16, 64, 8, 2, transposed=True),
    decode_tiling("T64w4s2", 16, 64, 4, 2, transposed=True),
)
DECODE_128 = (
    decode_tiling("r64t64w8s2", 64, 64, 8, 2),
    decode_tiling("r64t32w8s3", 64, 32, 8, 3),
    decode_tiling("r64t32w8s4", 64, 32, 8, 4),
    decode_tiling("R64T64w8s2", 64, 64, 8, 2, transposed=True),
    decode_tiling("r32t64w8s2", 32, 64, 8, 2, transposed=True),
)


def moe_tiling(
    name: str, rows: int, up: tuple[int, int, int, int], down: tuple[int, int, int, int], swapped: bool, group: int = 8
) -> moe_triton.Tiling:
    return moe_triton.Tiling(name, rows, up, down, (1, 2**30), swapped=swapped, architectures=(HOPPER,), group_m=group)


MOE_FEW = (
    moe_tiling("s16n64k128s4", 16, (64, 128, 4, 4), (64, 128, 4, 4), True),
    moe_tiling("s16n64k128s3", 16, (64, 128, 4, 3), (64, 128, 4, 3), True),
    moe_tiling("s16n64k64s5", 16, (64, 64, 4, 5), (64, 64, 4, 6), True),
    moe_tiling("s16n128k64s4", 16, (128, 64, 4, 4), (128, 64, 4, 4), True),
    moe_tiling("m16n32k128s4", 16, (32, 128, 4, 4), (64, 128, 4, 4), False),
    moe_tiling("m16n64k128s3", 16, (64, 128, 4, 3), (64, 128, 4, 4), False),
    moe_tiling("s32n64k128s3", 32, (64, 128, 4, 3), (64, 128, 4, 3), True),
    moe_tiling("s32n64k64s4", 32, (64, 64, 4, 4), (64, 64, 4, 5), True),
)
MOE_MANY = (
    moe_tiling("m64n64k64", 64, (64, 64, 4, 4), (128, 64, 4, 4), False),
    moe_tiling("m64n128k64w8", 64, (128, 64, 8, 3), (256, 64, 8, 3), False),
    moe_tiling("m128n128k64", 128, (128, 64, 8, 3), (256, 64, 8, 3), False),
    moe_tiling("m128n128k64s4", 128, (128, 64, 8, 4), (128, 64, 8, 4), False),
    moe_tiling("m128n64k64w8", 128, (64, 64, 8, 4), (128, 64, 8, 4), False),
    moe_tiling("m128n64k64w4", 128, (64, 64, 4, 3), (128, 64, 4, 3), False),
    moe_tiling("m64n128k64w4", 64, (128, 64, 4, 3), (256, 64, 4, 3), False),
    moe_tiling("m128n128k64g32", 128, (128, 64, 8, 3), (256, 64, 8, 3), False, 32),
    moe_tiling("m128n128k64g4", 128, (128, 64, 8, 3), (256, 64, 8, 3), False, 4),
)


def few_rows(columns: int, depth: int, warps: int, down: Variant) -> tuple[Variant, Variant]:
    constants = {"BLOCK_N": columns, "BLOCK_K": depth}
    return Variant("moe_few_gate_up", f"n{columns}k{depth}w{warps}", constants, warps, 1), down


def few_down(columns: int, depth: int, blocks: int, unroll: int, warps: int = 4) -> Variant:
    name = f"n{columns}k{depth}x{blocks}u{unroll}w{warps}"
    return moe_triton.few_down_row(name, columns=columns, depth=depth, blocks=blocks, unroll=unroll, warps=warps)


MOE_PAIRS = (
    few_rows(4, 1024, 4, few_down(4, 512, 3, 4)),
    few_rows(4, 2048, 4, few_down(4, 512, 3, 8)),
    few_rows(2, 2048, 4, few_down(2, 512, 3, 4)),
    few_rows(8, 1024, 4, few_down(8, 512, 3, 2)),
    few_rows(4, 2048, 8, few_down(2, 1024, 2, 8)),
    few_rows(2, 2048, 2, few_down(2, 512, 3, 8, 2)),
)
PREFILLS = tuple(
    mla_prefill_triton.variant(
        f"q{queries}k{keys}w{warps}s{stages}", (128, 128, 64), queries, keys, warps, stages, (HOPPER,), True
    )
    for queries, keys, warps, stages in (
        (128, 64, 8, 3),
        (128, 64, 8, 2),
        (128, 128, 8, 2),
        (128, 32, 8, 4),
        (64, 64, 4, 3),
    )
)


SPARSE_WIDTHS = ((128, 128, 64), (128, 128, 0), (64, 64, 0))
SPARSE_ATTENTIONS = tuple(
    block_sparse_attention_triton.variant(
        f"q{queries}k{keys}w{warps}s{stages}", widths, queries, keys, warps, stages, (HOPPER,)
    )
    for widths in SPARSE_WIDTHS
    for queries, keys, warps, stages in ((128, 64, 8, 3), (128, 64, 8, 4), (64, 64, 4, 3), (64, 64, 4, 2))
)
SPARSE_GEMMS = tuple(
    block_sparse_gemm_triton.variant(
        f"m{rows}n{columns}k{depth}w{warps}s{stages}g{group}", (rows, depth), columns, warps, stages, (HOPPER,), group
    )
    for rows, columns, depth, warps, stages, group in (
        (128, 256, 64, 8, 4, 8),
        (128, 256, 64, 8, 3, 8),
        (128, 256, 64, 8, 4, 16),
        (128, 128, 64, 8, 3, 8),
        (128, 128, 64, 4, 3, 8),
        (64, 256, 64, 8, 3, 8),
        (64, 256, 64, 4, 3, 8),
        (64, 128, 64, 4, 3, 8),
    )
)


def gemv_rows(kernel: str, norm: int, epilogue: str) -> Iterator[Variant]:
    for columns, depth, warps in ((8, 2048, 4), (4, 2048, 4), (16, 1024, 4), (16, 2048, 8), (8, 1024, 4), (2, 2048, 2)):
        yield small_gemm_triton.gemv_variant(
            kernel, norm, epilogue, columns, depth, warps, f"n{columns}k{depth}w{warps}"
        )


def gemm_rows(kernel: str, rows: int, norm: int, epilogue: str) -> Iterator[Variant]:
    for splits, columns, depth, stages in (
        (1, 64, 128, 3),
        (2, 64, 128, 3),
        (4, 64, 128, 3),
        (8, 64, 128, 3),
        (1, 64, 256, 3),
    ):
        tiling = small_gemm_triton.Tiling(
            f"m{rows}n{columns}k{depth}x{splits}",
            rows,
            columns,
            depth,
            splits,
            4,
            stages,
            (1, 2**30),
            (1, 64),
            (AMPERE, HOPPER),
        )
        yield tiling.variant(kernel, norm, epilogue)


PRODUCTS = {
    "q_kv_a": (3648, 2048, 1, "plain", False),
    "o_proj": (2048, 2048, 0, "residual", False),
    "lm_head": (102400, 2048, 1, "plain", True),
    "shared_gate_up": (2816, 2048, 1, "silu", False),
    "dense_down": (2048, 10944, 0, "residual", False),
}


def norm_rows(kernel: str) -> Iterator[Variant]:
    for warps in (4, 8, 16):
        yield Variant(kernel, f"b8192w{warps}", {"BLOCK": 8192}, warps, 1)


def rope_rows() -> Iterator[Variant]:
    for heads, warps in ((16, 1), (32, 2), (64, 4), (128, 4), (128, 8), (32, 4)):
        constants = {"BLOCK_HEADS": heads, "BLOCK_RANK": 512, "HALF": 32, "INTERLEAVED": 1}
        yield Variant("rope_cache", f"h{heads}w{warps}", constants, warps, 1)


GROUPED_WIDTH = 128
GROUPED_DECODES = tuple(
    grouped_decode_triton.Tiling(
        f"t{tile}w{warps}s{stages}x{blocks}",
        GROUPED_WIDTH,
        16,
        tile,
        warps,
        stages,
        (HOPPER,),
        (1, 16),
        blocks=blocks,
    ).variant(64)
    for tile, warps, stages, blocks in (
        (64, 4, 3, 2),
        (64, 4, 4, 2),
        (64, 4, 5, 1),
        (64, 4, 2, 2),
        (64, 8, 3, 1),
        (64, 8, 4, 1),
        (32, 4, 3, 2),
        (32, 4, 4, 3),
        (32, 4, 6, 2),
        (32, 2, 4, 4),
    )
)
GROUPED_PREFILLS = tuple(
    grouped_prefill_triton.variant(
        f"r{rows}k{tile}w{warps}s{stages}", GROUPED_WIDTH, rows, tile, warps, stages, (HOPPER,), 64
    )
    for rows, tile, warps, stages in (
        (128, 64, 8, 3),
        (128, 64, 8, 2),
        (128, 64, 8, 4),
        (128, 128, 8, 2),
        (128, 128, 8, 3),
        (128, 32, 8, 4),
        (64, 64, 4, 3),
        (64, 128, 4, 2),
    )
)
GROUPED_ROPES = tuple(
    grouped_rope_triton.variant(
        f"{'pairs' if interleaved else 'halves'}_h{heads}w{warps}",
        heads,
        GROUPED_WIDTH // 2,
        warps,
        interleaved=interleaved,
        norm=False,
    )
    for interleaved in (True, False)
    for heads, warps in ((4, 1), (8, 1), (16, 1), (8, 2), (16, 2), (16, 4), (32, 4), (32, 8))
)


def candidates() -> Iterator[tuple[Kernel, Variant]]:
    """Everything the sections may launch, to be compiled by all cores first."""
    for tiling in (*DECODE_16, *DECODE_128):
        yield mla_decode_triton.MLA_DECODE.kernel, tiling.variant(64)
    for moe in (*MOE_FEW, *MOE_MANY):
        yield moe_triton.GATE_UP.kernel, moe.variant("moe_gate_up")
        yield moe_triton.DOWN.kernel, moe.variant("moe_down")
    for first, second in MOE_PAIRS:
        yield moe_triton.FEW_GATE_UP.kernel, first
        yield moe_triton.FEW_DOWN.kernel, second
    for row in PREFILLS:
        yield mla_prefill_triton.MLA_PREFILL.kernel, row
    for row in SPARSE_ATTENTIONS:
        yield block_sparse_attention_triton.BLOCK_SPARSE_ATTENTION.kernel, row
    for row in SPARSE_GEMMS:
        yield block_sparse_gemm_triton.BLOCK_SPARSE_GEMM.kernel, row
    for _, _, norm, epilogue, wide in PRODUCTS.values():
        gemv = small_gemm_triton.ROW_GEMV_FP32 if wide else small_gemm_triton.ROW_GEMV
        gemm = small_gemm_triton.ROWS_GEMM_FP32 if wide else small_gemm_triton.ROWS_GEMM
        for row in gemv_rows(gemv.kernel.name, norm, epilogue):
            yield gemv.kernel, row
        for rows in (16, 32, 64):
            for row in gemm_rows(gemm.kernel.name, rows, norm, epilogue):
                yield gemm.kernel, row
    for table in (rms_norm_triton.RMS_NORM, rms_norm_triton.ADD_RMS_NORM):
        for row in norm_rows(table.kernel.name):
            yield table.kernel, row
    for row in rope_rows():
        yield rope_cache_triton.ROPE_CACHE.kernel, row
    for table, rows in (
        (grouped_decode_triton.GROUPED_DECODE, GROUPED_DECODES),
        (grouped_prefill_triton.GROUPED_PREFILL, GROUPED_PREFILLS),
        (grouped_rope_triton.GROUPED_ROPE_CACHE, GROUPED_ROPES),
    ):
        yield from ((table.kernel, row) for row in rows)
    for table in TABLES:
        if table not in small_gemm_triton.TABLES:
            yield from ((table.kernel, row) for row in table.variants if HOPPER in row.architectures)


def compile_one(item: tuple[Kernel, Variant]) -> str:
    """Fill Triton's cache; a candidate that does not compile is only told."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaLauncher

    kernel, row = item
    try:
        compiled = triton.compile(
            launcher.source(kernel, row, "bf16", 90),
            target=GPUTarget("cuda", 90, 32),
            options=launcher.options(kernel, row, 90),
        )
        CudaLauncher(compiled.src, compiled.metadata)
    except Exception as error:
        return f"{kernel.name} {row.name}: {error!r}"[:300]
    return ""


# Measuring.


def timed(functions: list[Callable[[], object]]) -> float:
    """Microseconds a call: the median of replays of one graph that calls each function once."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for function in functions:
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for function in functions:
            function()
    for _ in range(2):
        graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(functions))
    return statistics.median(times)


def relative_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    out, exact = out.double(), exact.double()
    return float((out - exact).norm() / exact.norm())


def random(*shape: int, scale: float = 1.0, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return (torch.randn(*shape, device=DEVICE, dtype=torch.float32) * scale).to(dtype)


class Report:
    """Appends rows to a file as they are measured, so that a crash loses none."""

    def __init__(self, path: Path, rates: tuple[float, float]) -> None:
        self.path, (self.copy, self.matmul) = path, rates

    def add(
        self, section: str, case: str, variant: str, us: float, moved: float, done: float = 0.0, **more: Any
    ) -> None:
        """moved: bytes; done: operations."""
        floor = max(moved / self.copy, done / self.matmul) * 1e6
        row = Row(section, case, variant, us, moved / us / 1e3, done / us / 1e6, floor, floor / us, **more)
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        print(
            f"{section:8} {case:24} {variant:20} {us:8.1f} us {row.gigabytes_per_second:5.0f} GB/s"
            f" {row.teraflops:5.1f} TF {row.of_floor:5.2f} err {row.error:.4f} ({row.torch_error:.4f}) {row.note}",
            flush=True,
        )

    def attempt(self, section: str, case: str, variant: str, measure: Callable[[], None]) -> None:
        try:
            measure()
        except Exception as error:
            if "CUDA error" in str(error) or "illegal" in str(error):
                raise
            print(f"{section:9} {case:26} {variant:22} FAILED {error!r}"[:300], flush=True)


def rates() -> tuple[float, float]:
    """The card's copy rate in bytes a second, read plus write, and its bf16 matmul rate in operations a second."""
    source = torch.randint(0, 255, (2**32,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    left, right = random(8192, 8192), random(8192, 8192)
    product = torch.empty_like(left)

    def eager(function: Callable[[], object], count: int) -> float:
        times = []
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(count):
                function()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3 / count)
        return statistics.median(times)

    return (
        2 * 2**32 / eager(lambda: target.copy_(source), 3),
        2 * 8192**3 / eager(lambda: torch.mm(left, right, out=product), 10),
    )


# Sections.


def section_norm(report: Report) -> None:
    for tokens, width in ((16384, 7168), (4096, 7168)):
        x, weight = random(tokens, width), random(width)
        moved = 2 * tokens * width * 2
        exact = torch.nn.functional.rms_norm(x[:64].double(), (width,), weight.double(), 1e-6)
        plain = relative_error(torch.nn.functional.rms_norm(x[:64], (width,), weight, 1e-6), exact)
        for row in norm_rows("rms_norm"):

            def measure(row: Variant = row) -> None:
                error = relative_error(rms_norm_triton.rms_norm(x, weight, 1e-6, variant=row)[:64], exact)
                us = timed([lambda: rms_norm_triton.rms_norm(x, weight, 1e-6, variant=row)])
                report.add("norm", f"rms {tokens}x{width}", row.name, us, moved, error=error, torch_error=plain)

            report.attempt("norm", "rms", row.name, measure)
        residual = random(tokens, width)
        for row in norm_rows("add_rms_norm"):

            def measure_add(row: Variant = row) -> None:
                us = timed([lambda: rms_norm_triton.add_rms_norm(x, residual, weight, 1e-6, variant=row)])
                report.add("norm", f"add rms {tokens}x{width}", row.name, us, 2 * moved)

            report.attempt("norm", "add rms", row.name, measure_add)


def section_rope(report: Report) -> None:
    for tokens, heads in ((16384, 128), (16384, 16)):
        q, latent = random(tokens, heads, 192), random(tokens, 576)
        weight, plane = random(512), random(tokens, 576)
        table = rope.rope_table(torch.rand(32, device=DEVICE), 1.0, tokens)
        positions, slots = torch.arange(tokens, device=DEVICE), torch.randperm(tokens, device=DEVICE)
        # A second set of queries, so that the smaller case does not stay in the cache.
        sets = [q, q.clone()] if heads == 128 else [q.clone() for _ in range(4)]
        moved = tokens * (4 * heads * 64 + 4 * 576 + 256)
        for row in rope_rows():

            def measure(row: Variant = row) -> None:
                us = timed(
                    [
                        partial(
                            rope_cache_triton.rope_cache,
                            part[..., 128:],
                            latent,
                            weight,
                            1e-6,
                            table,
                            positions,
                            slots,
                            plane,
                            variant=row,
                        )
                        for part in sets
                    ]
                )
                report.add("rope", f"{tokens} tokens, {heads} heads", row.name, us, moved)

            report.attempt("rope", "rope", row.name, measure)
        # A third of each row's bytes: how fast memory gives those alone, with next to nothing done to them.
        us = timed([partial(torch.Tensor.mul_, part[..., 128:], -1.0) for part in sets])
        report.add(
            "rope", f"{tokens} tokens, {heads} heads", "torch, the queries' slices alone", us, tokens * heads * 256
        )


def decode_case(batch: int, length: int, heads: int) -> dict[str, torch.Tensor]:
    blocks = -(-length // 64)
    plane = torch.empty(batch * blocks * 64, 576, dtype=DTYPE, device=DEVICE)
    for part in plane.split(2**20):
        part.normal_()
    return {
        "plane": plane,
        "tables": torch.randperm(batch * blocks, device=DEVICE).view(batch, blocks).to(torch.int32),
        "lengths": torch.full((batch,), length, dtype=torch.int32, device=DEVICE),
        "starts": torch.arange(batch + 1, dtype=torch.int32, device=DEVICE),
        "q": random(batch, heads, 512, scale=512**-0.5),
        "q_pe": random(batch, heads, 192)[..., 128:],
    }


def decode_plan(case: dict[str, torch.Tensor], heads: int, row: Variant) -> mla_decode_triton.DecodePlan:
    return mla_decode_triton.decode_plan(
        case["lengths"],
        case["starts"],
        case["tables"],
        page=64,
        heads=heads,
        rank=512,
        rotary=64,
        dtype=DTYPE,
        variant=row,
    )


def decode_errors(case: dict[str, torch.Tensor], out: torch.Tensor, sequence: int, length: int) -> tuple[float, float]:
    """The kernel's and torch's bf16 error for one sequence, against float64."""
    slots = (case["tables"][sequence].long()[:, None] * 64 + torch.arange(64, device=DEVICE)).flatten()[:length]
    entries = case["plane"][slots]
    query = torch.cat((case["q"][sequence], case["q_pe"][sequence]), dim=-1)
    exact = ((query.double() @ entries.double().t()) * 0.1).softmax(-1) @ entries[:, :512].double()
    scores = (query @ entries.t()).float() * 0.1
    plain = scores.softmax(-1).to(DTYPE) @ entries[:, :512]
    return relative_error(out[sequence], exact), relative_error(plain, exact)


def section_decode(report: Report) -> None:
    for batch, length, heads in (
        (128, 4096, 16),
        (128, 16384, 16),
        (128, 4112, 16),
        (1, 160000, 16),
        (32, 1024, 16),
        (128, 4096, 128),
        (128, 16384, 128),
    ):
        case = decode_case(batch, length, heads)
        moved = batch * (length * 1152 + heads * (576 + 512) * 2)
        done = batch * length * heads * 2 * (2 * 512 + 64)
        rows = {tiling.name: tiling.variant(64) for tiling in (DECODE_16 if heads == 16 else DECODE_128)}
        if heads > 16:
            rows |= {row.name: row for row in mla_decode_triton.MLA_DECODE_WIDE.variants}
        for name, row in rows.items():

            def measure(name: str = name, row: Variant = row) -> None:
                plan = decode_plan(case, heads, row)

                def run() -> torch.Tensor:
                    return mla_decode_triton.mla_decode(case["q"], case["q_pe"], case["plane"], plan, 0.1)[0]

                error, plain = decode_errors(case, run(), batch - 1, length)
                report.add(
                    "decode",
                    f"{batch} x {length}, {heads} heads",
                    name,
                    timed([run]),
                    moved,
                    done,
                    error=error,
                    torch_error=plain,
                )

            report.attempt("decode", f"{batch} x {length}, {heads}", name, measure)
        case.clear()


def balanced(tokens: int) -> torch.Tensor:
    """Experts [tokens, 6] of 64, each chosen equally often as far as that goes."""
    rounds = -(-tokens * 6 // 64)
    order = torch.cat([torch.randperm(64, device=DEVICE) for _ in range(rounds)])
    return order[: tokens * 6].view(tokens, 6).to(torch.int32)


def section_moe(report: Report) -> None:
    gate_up, down = random(64, 2816, 2048, scale=2048**-0.5), random(64, 2048, 1408, scale=1408**-0.5)
    for tokens in (1, 2, 4, 8, 32, 128, 256, 1024, 4096):
        x, weights = random(tokens, 2048), torch.rand(tokens, 6, device=DEVICE)
        routes = [balanced(tokens) for _ in range(10 if tokens <= 8 else 1)]
        touched = statistics.mean(len(route.unique()) for route in routes)
        moved = touched * 3 * 2048 * 1408 * 2 + tokens * 2048 * 4
        done = tokens * 6 * 6 * 2048 * 1408
        exact = torch.zeros(2048, dtype=torch.float64, device=DEVICE)
        plain = torch.zeros(2048, dtype=DTYPE, device=DEVICE)
        for rank, expert in enumerate(routes[0][-1].tolist()):
            gate, up = (gate_up[expert].double() @ x[-1].double()).chunk(2)
            exact += weights[-1, rank] * (down[expert].double() @ (torch.nn.functional.silu(gate) * up))
            gate, up = (gate_up[expert] @ x[-1]).chunk(2)
            plain += weights[-1, rank].to(DTYPE) * (down[expert] @ (torch.nn.functional.silu(gate) * up))
        plain_error = relative_error(plain, exact)

        def measure(name: str, **options: Any) -> None:
            error = relative_error(moe_triton.moe_experts(x, weights, routes[0], gate_up, down, **options)[-1], exact)
            us = timed(
                [partial(moe_triton.moe_experts, x, weights, route, gate_up, down, **options) for route in routes]
            )
            report.add(
                "moe",
                f"{tokens} tokens",
                name,
                us,
                moved,
                done,
                error=error,
                torch_error=plain_error,
                note=f"{touched:.0f} experts",
            )

        if tokens <= 4:
            for pair in MOE_PAIRS:
                name = f"{pair[0].name}/{pair[1].name}"
                report.attempt("moe", f"{tokens}", name, lambda: measure(name, few=pair))
        for tiling in MOE_FEW if tokens <= 256 else MOE_MANY:
            report.attempt("moe", f"{tokens}", tiling.name, lambda: measure(tiling.name, tiling=tiling))
        gate = random(64, 2048, scale=0.02, dtype=torch.float32)
        us = timed(
            [
                lambda: moe_gate_triton.moe_gate(
                    x, gate, None, method="greedy", top_k=6, normalize=False, scaling=1.0, shared=2
                )
            ]
        )
        report.add("moe", f"gate, {tokens} tokens", "declared", us, tokens * 4096 + 64 * 2048 * 4)


def section_prefill(report: Report) -> None:
    # 4,112 is no multiple of a tile: a token of it may cost no more than one of 4,096.
    for length in (4096, 4112, 16384):
        q, kv, k_pe = random(length, 16, 192), random(length, 16, 256), random(length, 64)
        starts = torch.tensor([0, length], dtype=torch.int32, device=DEVICE)
        done = length * (length + 1) / 2 * 16 * 2 * (192 + 128)
        rows = slice(length - 64, length)
        scores = torch.einsum("thd,nhd->htn", q[rows, :2, :128].double(), kv[:, :2, :128].double())
        scores = (scores + torch.einsum("thd,nd->htn", q[rows, :2, 128:].double(), k_pe.double())) * 0.1147
        future = torch.arange(length, device=DEVICE) > torch.arange(length - 64, length, device=DEVICE)[:, None]
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        exact = torch.einsum("htn,nhd->thd", weights, kv[:, :2, 128:].double())
        for row in PREFILLS:

            def measure(row: Variant = row) -> None:
                def run() -> torch.Tensor:
                    return mla_prefill_triton.mla_prefill(
                        q, kv, k_pe, starts, starts, longest=length, value_width=128, scale=0.1147, causal=True, row=row
                    )[0]

                error = relative_error(run()[rows, :2], exact)
                report.add(
                    "prefill", f"{length}, 16 heads", row.name, timed([run]), length * 16 * 576 * 2, done, error=error
                )

            report.attempt("prefill", f"{length}", row.name, measure)


SPARSE_SCALE = 0.1


def walk(length: int, heads: int, width: int) -> torch.Tensor:
    """float32 [1, length, heads, width]: unit directions that turn slowly, as neighbouring tokens' do."""
    steps = torch.randn(1, length, heads, width, device=DEVICE)
    # A walk that forgets: the mean of some 1,500 steps before, which comes back near to where it has been.
    span = 1536
    sums = torch.nn.functional.pad(steps, (0, 0, 0, 0, span, 0)).cumsum(1, dtype=torch.float64)
    return torch.nn.functional.normalize((sums[:, span:] - sums[:, :-span]).float(), dim=-1)


def sparse_inputs(length: int, heads: int, widths: tuple[int, int, int]) -> dict[str, torch.Tensor]:
    """Queries and keys along one walk, with noise, so that the blocks of high scores lie together."""
    width, value, rotary = widths
    path = walk(length, heads, width)
    q = torch.cat((path * 2 * width**0.5, torch.randn(1, length, heads, rotary, device=DEVICE)), dim=-1)
    inputs = {
        "q": (q + torch.randn_like(q)).to(DTYPE),
        "k": (path * 2 * width**0.5 + torch.randn_like(path)).to(DTYPE),
        "v": random(1, length, heads, value),
    }
    return inputs | ({"k_pe": random(1, length, rotary)} if rotary else {})


def long_map(mask: block_masks.Mask, length: int, row: Variant, heads: int = 1) -> BlockMap:
    return block_map(
        mask,
        queries=length,
        keys=length,
        block_queries=row.constants["BLOCK_QUERIES"],
        block_keys=row.constants["BLOCK_KEYS"],
        heads=heads,
        device=DEVICE,
    )


def causal_tiles(length: int, row: Variant) -> torch.Tensor:
    """bool [1, 1, query blocks, key blocks]: those with a pair of the causal triangle."""
    queries, keys = row.constants["BLOCK_QUERIES"], row.constants["BLOCK_KEYS"]
    first_key = torch.arange(0, length, keys, device=DEVICE)
    last_query = torch.arange(0, length, queries, device=DEVICE) + queries - 1
    return (first_key <= last_query.unsqueeze(-1))[None, None]


def sparse_masks(
    inputs: dict[str, torch.Tensor], length: int, row: Variant
) -> Iterator[tuple[str, block_masks.Mask, int]]:
    """Cases of a share of the causal triangle, and for how many heads their maps differ."""
    block = {"block_queries": row.constants["BLOCK_QUERIES"], "block_keys": row.constants["BLOCK_KEYS"]}
    causal, tiles, heads = block_masks.Causal(), causal_tiles(length, row), inputs["q"].shape[2]
    yield "first 10 %, window 512", block_masks.first_queries_and_window(length) & causal, 1
    for share in (0.1, 0.25, 0.5):
        yield f"band {share}", block_masks.Window(round(length * (1 - (1 - share) ** 0.5))) & causal, 1
        # share = first^2 + 2 (1 - first) 512 / length
        part = 512 / length
        first = part + (part**2 + share - 2 * part) ** 0.5
        name = f"first {first:.0%}, window 512"
        yield name, block_masks.first_queries_and_window(length, share=first) & causal, 1
        visible = tiles[0, 0].sum(-1)
        counts = torch.arange(1, tiles.shape[-1] + 1, device=DEVICE)
        found = torch.minimum(visible.unsqueeze(-1), counts).sum(0)
        count = max(1, int((found <= share * visible.sum()).sum()))
        yield (
            f"top-k {share}",
            block_masks.top_blocks(inputs["q"], inputs["k"], count, k_pe=inputs.get("k_pe"), causal=True, **block)
            & causal,
            heads,
        )
        drawn = torch.rand(tiles.shape, device=DEVICE) < share
        yield f"random {share}, no target", block_masks.ChosenBlocks(drawn & tiles, **block) & causal, 1


def sparse_errors(
    inputs: dict[str, torch.Tensor], out: torch.Tensor, mask: block_masks.Mask, length: int
) -> tuple[float, float]:
    """The kernel's and torch's bf16 error for some queries of two heads, against float64."""
    start = length - length // 3
    rows, heads = slice(start, start + 64), slice(0, 2)
    q, k, v = inputs["q"][:, rows, heads], inputs["k"][:, :, heads], inputs["v"][:, :, heads]
    k_pe = inputs.get("k_pe")

    def shifted(*place: torch.Tensor) -> torch.Tensor:
        batch, head, query, key = place
        return mask(batch, head, query + start, key)

    wide = None if k_pe is None else k_pe.double()
    exact, _ = block_sparse_attention(q.double(), k.double(), v.double(), shifted, SPARSE_SCALE, k_pe=wide)
    if k_pe is not None:
        k = torch.cat((k, k_pe.unsqueeze(2).expand(-1, -1, 2, -1)), dim=-1)
    numbers = [torch.arange(n, device=DEVICE).view(-1, *(1,) * axes) for n, axes in ((2, 2), (64, 1), (length, 0))]
    seen = shifted(numbers[0] * 0, *numbers)
    scores = (q[0].transpose(0, 1) @ k[0].permute(1, 2, 0)).float() * SPARSE_SCALE
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num(0.0).to(DTYPE)
    plain = (weights @ v[0].transpose(0, 1)).transpose(0, 1)
    return relative_error(out[:, rows, heads], exact), relative_error(plain[None], exact)


def sparse_attention_case(report: Report, length: int, heads: int, widths: tuple[int, int, int]) -> None:
    inputs = sparse_inputs(length, heads, widths)
    width, value, rotary = widths
    moved = length * 2 * (heads * (2 * width + rotary + 2 * value) + rotary)
    name = f"{length // 1024}k {width + rotary}/{value}"
    for row in SPARSE_ATTENTIONS:
        if row.when["width"][0] != width or row.when["value"][0] != value or row.when["rotary"][0] != rotary:
            continue
        tile = 2 * row.constants["BLOCK_QUERIES"] * row.constants["BLOCK_KEYS"] * (width + rotary + value)

        def run(blocks: BlockMap, row: Variant = row) -> torch.Tensor:
            return block_sparse_attention_triton.block_sparse_attention(
                inputs["q"], inputs["k"], inputs["v"], blocks, SPARSE_SCALE, k_pe=inputs.get("k_pe"), row=row
            )[0]

        def measure(row: Variant = row) -> None:
            tiles = causal_tiles(length, row)
            block = (row.constants["BLOCK_QUERIES"], row.constants["BLOCK_KEYS"])
            whole = long_map(block_masks.ChosenBlocks(tiles, *block), length, row)
            dense = timed([partial(run, whole)])
            report.add("sparse", f"{name} dense", row.name, dense, moved, heads * whole.present * tile)
            for case, mask, maps in sparse_masks(inputs, length, row):
                begin = time.monotonic()
                blocks = long_map(mask, length, row, maps)
                torch.cuda.synchronize()
                spent = time.monotonic() - begin
                share = blocks.density(whole)
                error, plain = sparse_errors(inputs, run(blocks), mask, length)
                us = timed([partial(run, blocks)])
                note = f"d {share:.3f}, time {us / (share * dense):.2f} d of dense,"
                note += f" {blocks.partial.present / blocks.present:.2f} partial, map {spent * 1e3:.0f} ms"
                done = heads * share * whole.present * tile
                errors = {"error": error, "torch_error": plain}
                report.add("sparse", f"{name} {case}", row.name, us, moved, done, **errors, note=note)

        report.attempt("sparse", name, row.name, measure)


def sparse_patterns(rows: int, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Masks of 8 x 8 blocks. Clustered: 64 patterns of tiles 64 deep, each of 128 rows of the matrix in any order."""
    groups, tiles = rows // 8, depth // 64
    for share in (0.1, 0.25, 0.5):
        for inside in (1.0, 0.7):
            patterns = (torch.rand(groups // 16, tiles) < share).repeat_interleave(16, 0)[torch.randperm(groups)]
            blocks = patterns.repeat_interleave(8, 1) & (torch.rand(groups, depth // 8) < inside)
            yield f"clustered {share}, {inside} of a tile", blocks.to(DEVICE)
    columns = torch.arange(depth // 8)
    middle = torch.arange(groups).unsqueeze(-1) * (depth / rows)
    yield "band 0.25", ((columns - middle).abs() < depth // 8 * 0.134).to(DEVICE)
    yield "random 0.01, no target", (torch.rand(groups, depth // 8) < 0.01).to(DEVICE)


def sparse_gemm_case(report: Report) -> None:
    rows, depth, columns = 8192, 8192, 4096
    a, b = random(rows, depth, scale=depth**-0.5), random(depth, columns)
    moved = 2 * (rows * depth + depth * columns + rows * columns)
    done = 2.0 * rows * depth * columns
    report.add("sparse", "gemm dense", "torch", timed([lambda: torch.mm(a, b)]), moved, done)
    cases = [("dense", torch.ones(rows // 8, depth // 8, dtype=torch.bool, device=DEVICE))]
    cases += list(sparse_patterns(rows, depth))
    dense: dict[str, float] = {}
    for case, mask in cases:
        grouped: dict[tuple[int, int], TiledMask] = {}
        exact = block_sparse_gemm(a[-64:].double(), b.double(), mask[-8:])
        plain = relative_error(block_sparse_gemm(a[-64:], b, mask[-8:]), exact)
        for row in SPARSE_GEMMS:
            tile = (row.constants["BLOCK_M"], row.constants["BLOCK_K"])

            def measure(row: Variant = row) -> None:
                if tile not in grouped:
                    grouped[tile] = tiled_mask(mask, rows=rows, depth=depth, tile_rows=tile[0], tile_depth=tile[1])
                tiled = grouped[tile]

                def run() -> torch.Tensor:
                    return block_sparse_gemm_triton.block_sparse_gemm(a, b, tiled, row=row)

                error, us = relative_error(run()[-64:], exact), timed([run])
                dense.setdefault(row.name, us)
                share = tiled.tile_density
                note = f"d {share:.3f}, of 8 x 8 {tiled.block_density:.3f}, time {us / (share * dense[row.name]):.2f} d"
                errors = {"error": error, "torch_error": plain}
                report.add("sparse", f"gemm {case}", row.name, us, moved * share, done * share, **errors, note=note)

            report.attempt("sparse", f"gemm {case}", row.name, measure)


def section_sparse(report: Report) -> None:
    """`d` is the share of the dense kernel's tiles that are present; dense is the same row with every one full."""
    for length, heads, widths in (
        (32768, 8, SPARSE_WIDTHS[0]),
        (65536, 4, SPARSE_WIDTHS[0]),
        (32768, 8, SPARSE_WIDTHS[1]),
        (32768, 8, SPARSE_WIDTHS[2]),
    ):
        sparse_attention_case(report, length, heads, widths)
    sparse_gemm_case(report)


def section_products(report: Report) -> None:
    for name, (columns, depth, norm, epilogue, wide) in PRODUCTS.items():
        wide_columns = columns * (2 if epilogue == "silu" else 1)
        copies = max(1, min(16, 2**28 // (wide_columns * depth * 2)))
        weights = [random(wide_columns, depth, scale=depth**-0.5) for _ in range(copies)]
        gain = random(depth) if norm else None
        # More splits are tried than the tables declare.
        workspace = small_gemm_triton.Workspace(
            torch.empty(2**25, dtype=torch.float32, device=DEVICE), torch.zeros(2**14, dtype=torch.int32, device=DEVICE)
        )
        for rows in (1, 8, 32, 64):
            x = random(rows, depth)
            residual = random(rows, columns) if epilogue == "residual" else None
            moved = wide_columns * depth * 2 + rows * (depth * 2 + columns * (4 if wide else 2))
            done = 2 * rows * wide_columns * depth
            exact = (
                x.double() if gain is None else torch.nn.functional.rms_norm(x.double(), (depth,), gain.double(), 1e-6)
            )
            exact = exact @ weights[0].double().t()
            if epilogue == "silu":
                exact = torch.nn.functional.silu(exact[:, :columns]) * exact[:, columns:]
            elif residual is not None:
                exact = exact + residual.double()
            gemv = small_gemm_triton.ROW_GEMV_FP32 if wide else small_gemm_triton.ROW_GEMV
            gemm = small_gemm_triton.ROWS_GEMM_FP32 if wide else small_gemm_triton.ROWS_GEMM
            options = list(gemm_rows(gemm.kernel.name, max(16, rows), norm, epilogue))
            if rows == 1:
                options = [*gemv_rows(gemv.kernel.name, norm, epilogue), *options]
            for row in options:

                def measure(row: Variant = row) -> None:
                    def run(weight: torch.Tensor) -> torch.Tensor:
                        return small_gemm_triton.small_gemm(
                            x,
                            weight,
                            workspace,
                            norm=gain,
                            eps=1e-6,
                            residual=residual,
                            silu=epilogue == "silu",
                            out_dtype=torch.float32 if wide else None,
                            variant=row,
                        )

                    error = relative_error(run(weights[0]), exact)
                    us = timed([partial(run, weight) for weight in weights])
                    report.add("products", f"{name}, {rows} rows", row.name, us, moved, done, error=error)

                if row.constants.get("SPLITS", 1) == 1 or columns <= 131 * 64:
                    report.attempt("products", f"{name}, {rows}", row.name, measure)
            us = timed([partial(torch.nn.functional.linear, x, weight) for weight in weights])
            report.add("products", f"{name}, {rows} rows", "torch, product alone", us, moved, done)


PACKED_SHAPES = {
    "V2-Lite gate and up": (2 * 10944, 2048),
    "V2-Lite down": (2048, 10944),
    "4096 x 4096": (4096, 4096),
    "V3 expert, gate and up": (2 * 2048, 7168),
    "V3 expert, down": (7168, 2048),
    "V3 dense, down": (7168, 18432),
}
"""Columns and depth."""
PACKED_GROUP, PACKED_BLOCK = 32, (128, 128)


def section_packed(report: Report) -> None:
    """Products with packed weights by the declared rows, beside torch's in bfloat16; weights come from memory."""
    for name, (columns, depth) in PACKED_SHAPES.items():
        copies = max(1, min(24, 2**28 // (columns * depth)))
        int4 = [packed_int4(columns, depth) for _ in range(copies)]
        fp8 = [packed_fp8(columns, depth) for _ in range(copies)]
        whole = [random(columns, depth, scale=depth**-0.5) for _ in range(copies)]
        for rows in (1, 2, 8, 16, 32, 256):
            x, case = random(rows, depth), f"{name}, {rows} rows"
            ends, done = 2 * rows * (depth + columns), 2 * rows * columns * depth

            def run_int4(weight: tuple[torch.Tensor, ...]) -> torch.Tensor:
                return int4_gemm(x, *weight, group_size=PACKED_GROUP)

            def run_fp8(weight: tuple[torch.Tensor, ...]) -> torch.Tensor:
                return fp8_block_gemm(x, *weight, block=PACKED_BLOCK)

            half = timed([partial(torch.nn.functional.linear, x, weight) for weight in whole])
            report.add("packed", case, "torch, bfloat16", half, 2 * columns * depth + ends, done)
            for kind, weights, run, exact in (
                ("int4", int4, run_int4, int4_linear(x.double(), *int4[0], PACKED_GROUP)),
                ("fp8", fp8, run_fp8, fp8_block_linear(x.double(), *fp8[0], PACKED_BLOCK)),
            ):
                error = relative_error(run(weights[0]), exact)
                us = timed([partial(run, weight) for weight in weights])
                moved = sum(part.numel() * part.element_size() for part in weights[0]) + ends
                report.add("packed", case, kind, us, moved, done, error=error, note=f"{half / us:.2f} of torch's rate")
    section_packed_experts(report)


def section_packed_experts(report: Report) -> None:
    """V2-Lite's experts of four bits beside those in bfloat16, the shared ones among them."""
    count, hidden, inner, top_k = 66, 2048, 1408, 8
    whole = random(count, 2 * inner, hidden, scale=hidden**-0.5), random(count, hidden, inner, scale=inner**-0.5)
    packed = tuple(
        PackedExperts(*(part.view(count, outputs, -1) for part in packed_int4(count * outputs, depth)))
        for outputs, depth in ((2 * inner, hidden), (hidden, inner))
    )
    for tokens in (1, 8, 32, 64, 512):
        x, weights = random(tokens, hidden), torch.rand(tokens, top_k, device=DEVICE)
        experts = torch.rand(tokens, count, device=DEVICE).topk(top_k, dim=-1).indices.int()
        touched = experts.unique().numel()
        done, case = 6 * tokens * top_k * hidden * inner, f"V2-Lite experts, {tokens} tokens"

        def run_whole() -> torch.Tensor:
            return moe_triton.moe_experts(x, weights, experts, *whole)

        def run_packed() -> torch.Tensor:
            return moe_experts_int4(x, weights, experts, *packed, group_size=PACKED_GROUP)

        half = timed([run_whole])
        report.add("packed", case, "bfloat16", half, 6 * touched * hidden * inner, done)
        us = timed([run_packed])
        moved = int(3 * touched * hidden * inner * (0.5 + 3 / PACKED_GROUP))
        report.add("packed", case, "int4", us, moved, done, note=f"{half / us:.2f} of bfloat16's rate")


def packed_int4(columns: int, depth: int) -> tuple[torch.Tensor, ...]:
    """Random weight, scales and zeros."""
    shape = (columns, depth // PACKED_GROUP)
    return (
        torch.randint(0, 256, (columns, depth // 2), dtype=torch.uint8, device=DEVICE),
        (torch.rand(shape, device=DEVICE) * 0.3 * depth**-0.5).to(DTYPE),
        torch.randint(0, 16, shape, dtype=torch.uint8, device=DEVICE),
    )


def packed_fp8(columns: int, depth: int) -> tuple[torch.Tensor, ...]:
    """Random weight and scales."""
    blocks = (-(-columns // PACKED_BLOCK[0]), -(-depth // PACKED_BLOCK[1]))
    weight = random(columns, depth, scale=60.0, dtype=torch.float32).to(torch.float8_e4m3fn)
    return weight, torch.rand(blocks, device=DEVICE) * 0.02 * depth**-0.5


def section_sampling(report: Report) -> None:
    vocabulary = 102400
    for count in (1, 32, 128):
        logits = random(count, vocabulary, scale=2.0, dtype=torch.float32)

        def column(value: float, dtype: torch.dtype, count: int = count) -> torch.Tensor:
            return torch.full((count,), value, dtype=dtype, device=DEVICE)

        filters: dict[str, dict[str, float]] = {
            "greedy": {"temperature": 0.0},
            "plain": {},
            "top_k 50": {"top_k": 50},
            "top_k 50, top_p 0.95": {"top_k": 50, "top_p": 0.95},
            "top_p 0.95": {"top_p": 0.95},
        }
        for name, values in filters.items():
            rows = sampling_triton.SamplingRows(
                temperature=column(values.get("temperature", 0.6), torch.float32),
                min_p=column(0.0, torch.float32),
                top_k=column(values.get("top_k", 0), torch.int32),
                top_p=column(values.get("top_p", 1.0), torch.float32),
                repetition=column(1.0, torch.float32),
                frequency=column(0.0, torch.float32),
                presence=column(0.0, torch.float32),
                seeds=torch.arange(count, device=DEVICE),
                choices=column(0, torch.int32),
                positions=column(5, torch.int32),
                penalty_rows=column(-1, torch.int32),
                counts=torch.zeros(1, 1, dtype=torch.int32, device=DEVICE),
                prompt=torch.zeros(1, 1, dtype=torch.int8, device=DEVICE),
                mask_rows=column(-1, torch.int32),
                masks=torch.zeros(1, 16, dtype=torch.uint8, device=DEVICE),
                edit_starts=torch.zeros(count + 1, dtype=torch.int32, device=DEVICE),
                edit_tokens=torch.zeros(1, dtype=torch.int32, device=DEVICE),
                edit_values=torch.zeros(1, device=DEVICE),
            )
            us = timed([partial(sampling_triton.sample, logits, rows)])
            report.add("sampling", f"{count} x {vocabulary}, {name}", "declared", us, count * vocabulary * 4 * 3)


def paged_planes(batch: int, length: int, key_heads: int) -> dict[str, torch.Tensor]:
    """Random keys and values of whole blocks of 64, in shuffled order."""
    blocks = -(-length // 64)
    planes = [torch.empty(batch * blocks * 64, key_heads * GROUPED_WIDTH, dtype=DTYPE, device=DEVICE) for _ in range(2)]
    for plane in planes:
        for part in plane.split(2**18):
            part.normal_()
    return {
        "keys": planes[0],
        "values": planes[1],
        "tables": torch.randperm(batch * blocks, device=DEVICE).view(batch, blocks).to(torch.int32),
        "lengths": torch.full((batch,), length, dtype=torch.int32, device=DEVICE),
    }


def grouped_errors(
    case: dict[str, torch.Tensor], q: torch.Tensor, out: torch.Tensor, sequence: int, length: int
) -> tuple[float, float]:
    """The kernel's and torch's bf16 error for the query heads of key head 0, against float64.

    q and out [n, heads of the key head, d]: a sequence's last tokens.
    """
    slots = (case["tables"][sequence].long()[:, None] * 64 + torch.arange(64, device=DEVICE)).flatten()[:length]
    k, v = (case[name][slots, :GROUPED_WIDTH] for name in ("keys", "values"))
    future = torch.arange(length, device=DEVICE) > torch.arange(length - q.shape[0], length, device=DEVICE)[:, None]
    scale = GROUPED_WIDTH**-0.5

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("tgd,nd->tgn", q, k) * scale
        return scores.masked_fill(future[:, None], float("-inf")).softmax(-1) @ v

    exact = attend(q.double(), k.double(), v.double())
    return relative_error(out, exact), relative_error(attend(q, k, v), exact)


def contiguous_attention(
    case: dict[str, torch.Tensor], q: torch.Tensor, batch: int, length: int
) -> Callable[[], torch.Tensor]:
    """torch's attention over the same planes, read as if each sequence's entries followed each other."""
    k, v = (
        case[name].view(batch, -1, case["keys"].shape[1] // GROUPED_WIDTH, GROUPED_WIDTH) for name in ("keys", "values")
    )
    k, v = (x[:, :length].transpose(1, 2) for x in (k, v))
    queries = q.view(batch, -1, *q.shape[1:]).transpose(1, 2)
    return partial(
        torch.nn.functional.scaled_dot_product_attention,
        queries,
        k,
        v,
        is_causal=queries.shape[2] > 1,
        enable_gqa=queries.shape[1] != k.shape[1],
    )


def grouped_decodes(report: Report) -> None:
    for batch, length, heads, key_heads in (
        (128, 4096, 32, 8),
        (128, 4112, 32, 8),
        (1, 32768, 32, 8),
        (128, 4096, 32, 32),
        (1, 32768, 32, 32),
    ):
        case, q = paged_planes(batch, length, key_heads), random(batch, heads, GROUPED_WIDTH)
        starts = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE)
        group, name = heads // key_heads, f"decode {batch} x {length}, {heads}/{key_heads}"
        moved = batch * 4 * GROUPED_WIDTH * (length * key_heads + heads)
        done = batch * length * heads * 4 * GROUPED_WIDTH
        for row in GROUPED_DECODES:

            def measure(row: Variant = row) -> None:
                plan = grouped_decode_triton.grouped_decode_plan(
                    case["lengths"],
                    starts,
                    case["tables"],
                    page=64,
                    heads=heads,
                    key_heads=key_heads,
                    width=GROUPED_WIDTH,
                    dtype=DTYPE,
                    variant=row,
                )

                def run() -> torch.Tensor:
                    return grouped_decode_triton.grouped_decode(
                        q, case["keys"], case["values"], plan, GROUPED_WIDTH**-0.5
                    )[0]

                error, plain = grouped_errors(case, q[-1:, :group], run()[-1:, :group], batch - 1, length)
                report.add("grouped", name, row.name, timed([run]), moved, done, error=error, torch_error=plain)

            report.attempt("grouped", name, row.name, measure)

        def beside() -> None:
            us = timed([contiguous_attention(case, q, batch, length)])
            report.add("grouped", name, "torch, no pages", us, moved, done)

        report.attempt("grouped", name, "torch, no pages", beside)
        case.clear()


def grouped_prefills(report: Report) -> None:
    heads, key_heads, last = 32, 8, 64
    group = heads // key_heads
    for length in (4096, 4112, 16384):
        case, q = paged_planes(1, length, key_heads), random(length, heads, GROUPED_WIDTH)
        starts = torch.tensor([0, length], dtype=torch.int32, device=DEVICE)
        moved = length * (heads + key_heads) * 4 * GROUPED_WIDTH
        done = length * (length + 1) // 2 * heads * 4 * GROUPED_WIDTH
        name = f"prefill {length}, {heads}/{key_heads}"
        for row in GROUPED_PREFILLS:

            def measure(row: Variant = row) -> None:
                def run() -> torch.Tensor:
                    return grouped_prefill_triton.grouped_prefill(
                        q,
                        case["keys"],
                        case["values"],
                        starts,
                        case["lengths"],
                        case["tables"],
                        page=64,
                        longest=length,
                        scale=GROUPED_WIDTH**-0.5,
                        table_rows=starts[:1],
                        row=row,
                    )[0]

                error, plain = grouped_errors(case, q[-last:, :group], run()[-last:, :group], 0, length)
                report.add("grouped", name, row.name, timed([run]), moved, done, error=error, torch_error=plain)

            report.attempt("grouped", name, row.name, measure)

        def beside() -> None:
            us = timed([contiguous_attention(case, q, 1, length)])
            report.add("grouped", name, "torch, no pages", us, moved, done)

        report.attempt("grouped", name, "torch, no pages", beside)
        case.clear()


def grouped_ropes(report: Report) -> None:
    tokens, half = 16384, GROUPED_WIDTH // 2
    inv_freq = torch.rand(half, device=DEVICE)
    table = rope.rope_table(inv_freq, 1.0, tokens)
    positions, slots = torch.arange(tokens, device=DEVICE), torch.randperm(tokens, device=DEVICE)
    turns = rope.rotations(positions[-64:], inv_freq, 1.0)
    for heads, key_heads in ((32, 8), (32, 32)):
        # Two sets, so that none of either stays in the cache.
        sets = [
            (
                random(tokens, heads + 2 * key_heads, GROUPED_WIDTH).split((heads, key_heads, key_heads), dim=1),
                [torch.empty(tokens, key_heads * GROUPED_WIDTH, dtype=DTYPE, device=DEVICE) for _ in range(2)],
            )
            for _ in range(2)
        ]
        moved = tokens * GROUPED_WIDTH * (4 * heads + 8 * key_heads + 4)
        for row in GROUPED_ROPES:
            interleaved = bool(row.constants["INTERLEAVED"])
            order = rope.interleaving(GROUPED_WIDTH).to(DEVICE)

            def turned(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
                x = x if interleaved else x[..., order]
                x = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * rotation)
                return x.flatten(-2) if interleaved else torch.cat((x[..., 0], x[..., 1]), dim=-1)

            def run(part: int, row: Variant = row) -> None:
                projections, planes = sets[part]
                grouped_rope_triton.grouped_rope_cache(
                    *projections, table, positions, slots, *planes, interleaved=interleaved, row=row
                )

            def measure(row: Variant = row) -> None:
                before = sets[0][0][0][-64:].clone()
                run(0)
                exact = turned(before.double(), turns.to(torch.complex128))
                error = relative_error(sets[0][0][0][-64:], exact)
                plain = relative_error(turned(before.float(), turns).to(DTYPE), exact)
                us = timed([partial(run, part) for part in range(len(sets))])
                name = f"rope {tokens} tokens, {heads}/{key_heads}"
                report.add("grouped", name, row.name, us, moved, error=error, torch_error=plain)

            report.attempt("grouped", "rope", row.name, measure)


def section_grouped(report: Report) -> None:
    grouped_decodes(report)
    grouped_prefills(report)
    grouped_ropes(report)


SECTIONS: dict[str, Callable[[Report], None]] = {
    "decode": section_decode,
    "moe": section_moe,
    "prefill": section_prefill,
    "sparse": section_sparse,
    "products": section_products,
    "packed": section_packed,
    "norm": section_norm,
    "rope": section_rope,
    "grouped": section_grouped,
    "sampling": section_sampling,
}


def work(sections: list[str], path: Path) -> None:
    """The measuring process: tells each section that it begins, so that the parent knows which one broke it."""
    torch.manual_seed(0)
    measured = rates()
    header = {"card": torch.cuda.get_device_name(), "copy_bytes_per_second": measured[0], "matmul_flops": measured[1]}
    header |= {"torch": torch.__version__, "capability": torch.cuda.get_device_capability()}
    with path.open("a") as file:
        file.write(json.dumps({"header": header}) + "\n")
    print(header, flush=True)
    for name in sections:
        with path.open("a") as file:
            file.write(json.dumps({"begin": name}) + "\n")
        begin = time.monotonic()
        SECTIONS[name](Report(path, measured))
        print(f"-- {name} took {time.monotonic() - begin:.1f} s, {launcher.compilations()} binaries", flush=True)
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "kernels.jsonl"
    sections = options.sections.split(",")
    if options.worker:
        work(sections, path)
        return
    path.unlink(missing_ok=True)
    begin = time.monotonic()
    items = list({(kernel.name, row.name): (kernel, row) for kernel, row in candidates()}.values())
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 1) - 1)) as pool:
        for problem in filter(None, pool.map(compile_one, items, chunksize=2)):
            print(problem, flush=True)
    print(f"-- compiled {len(items)} rows in {time.monotonic() - begin:.1f} s", flush=True)
    while sections:
        command = [sys.executable, __file__, "--worker", "--out", str(options.out), "--sections", ",".join(sections)]
        if subprocess.run(command).returncode == 0:
            break
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        begun = [line["begin"] for line in lines if "begin" in line]
        broken = begun[-1] if begun else sections[0]
        print(f"-- {broken} broke its process", flush=True)
        sections = sections[sections.index(broken) + 1 :]


if __name__ == "__main__":
    main()
