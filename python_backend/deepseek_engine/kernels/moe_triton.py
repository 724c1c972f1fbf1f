# mypy: disable-error-code="no-untyped-def"
# Device functions have no types that mypy knows.
"""The experts of a mixture-of-experts layer on a GPU; the reference is `moe_experts.py`.

    out[t] = sum_k weights[t, k] W_down[e] (silu(W_gate[e] x[t]) * W_up[e] x[t]),     e = experts[t, k] >= 0

(DeepSeekMoE, arXiv:2401.06066.) A choice below 0 is an expert of another rank and adds nothing.

Sorted: `moe_sort` brings the choices (pairs of token and rank, p = t * top_k + k) into the order of their experts,
each expert's run padded to whole tiles; `moe_gate_up` and `moe_down` are products over those tiles, with SiLU * up and
the weight in their epilogues; `moe_combine` adds a token's choices in their order, so results never depend on what
else is in the batch. Few tokens skip the sorting: `moe_few_gate_up` and `moe_few_down` read a chosen expert's rows as
matrix-vector products, whose every load is in flight at once.

Bytes: 3 hidden I elements of each expert touched; operations: 6 hidden I a choice. Balanced, V2-Lite's 64 experts are
bound by memory up to about 1,000 tokens on an H200.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_engine.kernels import launcher
from deepseek_engine.kernels.chaining import follow
from deepseek_engine.kernels.dispatch import require
from deepseek_engine.kernels.variants import (
    ADA,
    AMPERE,
    ARCHITECTURES,
    HOPPER,
    Kernel,
    LaunchPlan,
    Step,
    Table,
    Variant,
    ceil_div,
)


@triton.jit
def silu_times(gate, up):
    return gate * tl.sigmoid(gate) * up


@triton.jit
def moe_sort_kernel(
    experts_ptr,
    sorted_ptr,
    tile_experts_ptr,
    tiles_ptr,
    pairs,
    experts,
    CHUNK: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program an expert, a stable counting sort without atomics.

    sorted: the expert's pairs, -1 in the padding; tile_experts: the expert of each tile; tiles: their number.
    """
    follow(CHAINED)
    own = tl.program_id(0)
    number = tl.arange(0, BLOCK_EXPERTS)
    lane = tl.arange(0, CHUNK)
    counts = tl.zeros((BLOCK_EXPERTS,), dtype=tl.int32)
    for start in tl.range(0, pairs, CHUNK):
        chosen = tl.load(experts_ptr + start + lane, mask=start + lane < pairs, other=-1)
        # The spare last bin takes what is not local.
        counts += tl.histogram(tl.where((chosen < 0) | (chosen >= experts), BLOCK_EXPERTS - 1, chosen), BLOCK_EXPERTS)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    first_tile = tl.sum(tl.where(number < own, tiles, 0), axis=0)
    count = tl.sum(tl.where(number == own, counts, 0), axis=0)
    own_tiles = (count + BLOCK_M - 1) // BLOCK_M
    if own == experts - 1:
        tl.store(tiles_ptr, first_tile + own_tiles)
    base = first_tile * BLOCK_M
    found = 0
    if count > 0:
        for start in tl.range(0, pairs, CHUNK):
            chosen = tl.load(experts_ptr + start + lane, mask=start + lane < pairs, other=-1)
            mine = (chosen == own).to(tl.int32)
            place = base + found + tl.cumsum(mine, axis=0) - 1
            tl.store(sorted_ptr + place, start + lane, mask=mine > 0)
            found += tl.sum(mine, axis=0)
        padding = count + tl.arange(0, BLOCK_M)
        tl.store(sorted_ptr + base + padding, tl.full((BLOCK_M,), -1, tl.int32), mask=padding < own_tiles * BLOCK_M)
        for start in tl.range(0, own_tiles, 64):
            tile = start + tl.arange(0, 64)
            tl.store(tile_experts_ptr + first_tile + tile, tl.zeros((64,), tl.int32) + own, mask=tile < own_tiles)


@triton.jit
def tile_of(columns, row_tiles, GROUP_M: tl.constexpr):
    """Row and column tile of this program: GROUP_M row tiles share a column tile while the cache holds it."""
    program = tl.program_id(0)
    group = program // (GROUP_M * columns)
    first = group * GROUP_M
    height = tl.minimum(row_tiles - first, GROUP_M)
    inner = program % (GROUP_M * columns)
    return first + inner % height, inner // height


@triton.jit
def moe_gate_up_kernel(
    x_ptr,
    weight_ptr,
    inner_ptr,
    sorted_ptr,
    tile_experts_ptr,
    tiles_ptr,
    x_stride,
    expert_stride,
    hidden,
    intermediate,
    top_k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SWAPPED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """inner[place] = silu(gate) * up for every place of the sorted pairs."""
    follow(CHAINED)
    row_tiles = tl.load(tiles_ptr)
    columns = tl.cdiv(intermediate, BLOCK_N)
    if tl.program_id(0) < row_tiles * columns:
        tile, column_tile = tile_of(columns, row_tiles, GROUP_M)
        expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
        place = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        pair = tl.load(sorted_ptr + place)
        real = pair >= 0
        n = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        wanted = n < intermediate
        x_rows = x_ptr + tl.where(real, pair // top_k, 0).to(tl.int64) * x_stride
        # Columns past the last read a real one, and are dropped when the tile is stored.
        gate_rows = weight_ptr + expert * expert_stride + tl.where(wanted, n, 0).to(tl.int64) * hidden
        up_rows = gate_rows + intermediate.to(tl.int64) * hidden
        if SWAPPED:
            gate = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            for start in tl.range(0, hidden, BLOCK_K):
                inside = start + k < hidden
                x = tl.load(x_rows[None, :] + start + k[:, None], mask=inside[:, None] & real[None, :], other=0.0)
                w_gate = tl.load(gate_rows[:, None] + start + k[None, :], mask=inside[None, :], other=0.0)
                w_up = tl.load(up_rows[:, None] + start + k[None, :], mask=inside[None, :], other=0.0)
                gate = tl.dot(w_gate, x, gate, input_precision="ieee")
                up = tl.dot(w_up, x, up, input_precision="ieee")
            inner = silu_times(gate, up).to(inner_ptr.dtype.element_ty)
            target = inner_ptr + place.to(tl.int64)[None, :] * intermediate + n[:, None]
            tl.store(target, inner, mask=real[None, :] & wanted[:, None])
        else:
            gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for start in tl.range(0, hidden, BLOCK_K):
                inside = start + k < hidden
                x = tl.load(x_rows[:, None] + start + k[None, :], mask=inside[None, :] & real[:, None], other=0.0)
                w_gate = tl.load(gate_rows[None, :] + start + k[:, None], mask=inside[:, None], other=0.0)
                w_up = tl.load(up_rows[None, :] + start + k[:, None], mask=inside[:, None], other=0.0)
                gate = tl.dot(x, w_gate, gate, input_precision="ieee")
                up = tl.dot(x, w_up, up, input_precision="ieee")
            inner = silu_times(gate, up).to(inner_ptr.dtype.element_ty)
            target = inner_ptr + place.to(tl.int64)[:, None] * intermediate + n[None, :]
            tl.store(target, inner, mask=real[:, None] & wanted[None, :])


@triton.jit
def moe_down_kernel(
    inner_ptr,
    weight_ptr,
    weights_ptr,
    outputs_ptr,
    sorted_ptr,
    tile_experts_ptr,
    tiles_ptr,
    expert_stride,
    hidden,
    intermediate,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SWAPPED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """outputs[pair] = weights[pair] * (W_down inner[place])."""
    follow(CHAINED)
    row_tiles = tl.load(tiles_ptr)
    columns = tl.cdiv(hidden, BLOCK_N)
    if tl.program_id(0) < row_tiles * columns:
        tile, column_tile = tile_of(columns, row_tiles, GROUP_M)
        expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
        place = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        pair = tl.load(sorted_ptr + place)
        real = pair >= 0
        n = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        wanted = n < hidden
        weight = tl.load(weights_ptr + pair, mask=real, other=0.0)
        inner_rows = inner_ptr + place.to(tl.int64) * intermediate
        down_rows = weight_ptr + expert * expert_stride + tl.where(wanted, n, 0).to(tl.int64) * intermediate
        out_rows = outputs_ptr + pair.to(tl.int64) * hidden
        if SWAPPED:
            acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            for start in tl.range(0, intermediate, BLOCK_K):
                inside = start + k < intermediate
                x = tl.load(inner_rows[None, :] + start + k[:, None], mask=inside[:, None] & real[None, :], other=0.0)
                w = tl.load(down_rows[:, None] + start + k[None, :], mask=inside[None, :], other=0.0)
                acc = tl.dot(w, x, acc, input_precision="ieee")
            acc = (acc * weight[None, :]).to(outputs_ptr.dtype.element_ty)
            tl.store(out_rows[None, :] + n[:, None], acc, mask=real[None, :] & wanted[:, None])
        else:
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for start in tl.range(0, intermediate, BLOCK_K):
                inside = start + k < intermediate
                x = tl.load(inner_rows[:, None] + start + k[None, :], mask=inside[None, :] & real[:, None], other=0.0)
                w = tl.load(down_rows[None, :] + start + k[:, None], mask=inside[:, None], other=0.0)
                acc = tl.dot(x, w, acc, input_precision="ieee")
            acc = (acc * weight[:, None]).to(outputs_ptr.dtype.element_ty)
            tl.store(out_rows[:, None] + n[None, :], acc, mask=real[:, None] & wanted[None, :])


@triton.jit
def moe_combine_kernel(
    outputs_ptr,
    experts_ptr,
    out_ptr,
    hidden,
    experts,
    top_k,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """out[t] = the sum of a token's local choices, in float32, in the order of its choices."""
    follow(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in tl.range(0, top_k, UNROLL):
        for step in tl.static_range(UNROLL):
            rank = first + step
            chosen = tl.load(experts_ptr + token * top_k + rank, mask=rank < top_k, other=-1)
            local = (chosen >= 0) & (chosen < experts)
            row = outputs_ptr + (token * top_k + rank) * hidden
            acc += tl.load(row + column, mask=inside & local, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * hidden + column, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def moe_few_gate_up_kernel(
    x_ptr,
    weight_ptr,
    experts_ptr,
    inner_ptr,
    x_stride,
    expert_stride,
    hidden,
    intermediate,
    experts,
    top_k,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """inner[pair] = silu(gate) * up, one program a pair and BLOCK_N columns."""
    follow(CHAINED)
    pair = tl.program_id(0)
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    if (expert >= 0) & (expert < experts):
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        wanted = n < intermediate
        x_row = x_ptr + (pair // top_k).to(tl.int64) * x_stride
        rows = weight_ptr + expert * expert_stride + n.to(tl.int64)[:, None] * hidden
        step_up = intermediate.to(tl.int64) * hidden
        gate = tl.zeros((BLOCK_N,), dtype=tl.float32)
        up = tl.zeros((BLOCK_N,), dtype=tl.float32)
        for start in tl.range(0, hidden, BLOCK_K):
            column = start + k
            inside = wanted[:, None] & (column < hidden)[None, :]
            w_gate = tl.load(rows + column[None, :], mask=inside, other=0.0)
            w_up = tl.load(rows + step_up + column[None, :], mask=inside, other=0.0)
            x = tl.load(x_row + column, mask=column < hidden, other=0.0).to(tl.float32)[None, :]
            gate += tl.sum(w_gate.to(tl.float32) * x, axis=1)
            up += tl.sum(w_up.to(tl.float32) * x, axis=1)
        inner = silu_times(gate, up).to(inner_ptr.dtype.element_ty)
        tl.store(inner_ptr + pair.to(tl.int64) * intermediate + n, inner, mask=wanted)


@triton.jit
def weighted_terms(weight_row, inner_row, weight, start, wanted, local, intermediate, BLOCK_K: tl.constexpr):
    """[BLOCK_N, BLOCK_K] products of a block of columns, not yet summed."""
    column = start + tl.arange(0, BLOCK_K)
    inside = (column < intermediate) & local
    w = tl.load(weight_row + column[None, :], mask=wanted[:, None] & inside[None, :], other=0.0)
    x = tl.load(inner_row + column, mask=inside, other=0.0)
    return w.to(tl.float32) * (x.to(tl.float32) * weight)[None, :]


@triton.jit
def moe_few_down_kernel(
    inner_ptr,
    weight_ptr,
    weights_ptr,
    experts_ptr,
    out_ptr,
    expert_stride,
    hidden,
    intermediate,
    experts,
    top_k,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr,
    UNROLL: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """out[t], the weighted sum over the token's choices, one program a token and BLOCK_N columns.

    Terms are summed across threads once, at the end, so that the loads of UNROLL choices are in flight together. BLOCKS
    blocks of columns are known to be enough; 0 loops over them.
    """
    follow(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    wanted = n < hidden
    acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for first in tl.range(0, top_k, UNROLL):
        for step in tl.static_range(UNROLL):
            rank = first + step
            pair = token * top_k + rank
            expert = tl.load(experts_ptr + pair, mask=rank < top_k, other=-1).to(tl.int64)
            local = (expert >= 0) & (expert < experts)
            weight = tl.load(weights_ptr + pair, mask=local, other=0.0)
            base = weight_ptr + tl.where(local, expert, 0) * expert_stride
            rows = base + n.to(tl.int64)[:, None] * intermediate
            inner_row = inner_ptr + pair * intermediate
            if BLOCKS > 0:
                for block in tl.static_range(BLOCKS):
                    acc += weighted_terms(
                        rows, inner_row, weight, block * BLOCK_K, wanted, local, intermediate, BLOCK_K
                    )
            else:
                for start in tl.range(0, intermediate, BLOCK_K):
                    acc += weighted_terms(rows, inner_row, weight, start, wanted, local, intermediate, BLOCK_K)
    out = tl.sum(acc, axis=1)
    tl.store(out_ptr + token * hidden + n, out.to(out_ptr.dtype.element_ty), mask=wanted)


_MODULE = "deepseek_engine.kernels.moe_triton"
_SORTED = {"sorted_ptr": "*i32", "tile_experts_ptr": "*i32", "tiles_ptr": "*i32"}
_TILE_CONSTANTS = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M", "SWAPPED")

SORT = Table(
    Kernel(
        name="moe_sort",
        entry=f"{_MODULE}:moe_sort_kernel",
        signature={"experts_ptr": "*i32", **_SORTED, "pairs": "i32", "experts": "i32"},
        constants=("CHUNK", "BLOCK_EXPERTS", "BLOCK_M"),
        divisible=frozenset(("experts_ptr",)),
        chained=True,
    ),
    tuple(
        Variant(
            "moe_sort",
            f"rows{rows}_experts{experts}_chunk{chunk}",
            {"CHUNK": chunk, "BLOCK_EXPERTS": experts, "BLOCK_M": rows},
            num_warps=warps,
            num_stages=1,
            # Tiles of 8 are of kernels for that architecture alone.
            architectures=(HOPPER,) if rows == 8 else ARCHITECTURES,
            when={"block_m": (rows, rows), "experts": (1, experts - 1), "pairs": reach},
        )
        for rows in (8, 16, 32, 64, 128)
        for experts in (128, 512)
        for chunk, warps, reach in ((512, 4, (1, 512)), (4096, 8, (1, 2**31 - 1)))
        # Tiles of many rows are for many choices.
        if chunk == 4096 or rows <= 32
    ),
)


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tiles of both products for a range of choices an expert gets on average."""

    name: str
    rows: int
    up: tuple[int, int, int, int]
    """BLOCK_N, BLOCK_K, warps and stages of gate and up: BLOCK_N columns of each."""
    down: tuple[int, int, int, int]
    load: tuple[int, int]
    """Choices an expert, rounded up."""
    swapped: bool = False
    architectures: tuple[int, ...] = ARCHITECTURES
    group_m: int = 8

    def variant(self, kernel: str) -> Variant:
        columns, depth, warps, stages = self.up if kernel == "moe_gate_up" else self.down
        return Variant(
            kernel,
            self.name,
            {
                "BLOCK_M": self.rows,
                "BLOCK_N": columns,
                "BLOCK_K": depth,
                "GROUP_M": self.group_m,
                "SWAPPED": int(self.swapped),
            },
            num_warps=warps,
            num_stages=stages,
            architectures=self.architectures,
            when={"load": self.load},
            wide_tiles=self.rows >= 64 or self.swapped,
        )


TILINGS = (
    Tiling("rows16_sm90", 16, (64, 128, 4, 3), (64, 128, 4, 3), (1, 16), swapped=True, architectures=(HOPPER,)),
    Tiling("rows32_sm90", 32, (64, 64, 4, 4), (64, 64, 4, 5), (17, 40), swapped=True, architectures=(HOPPER,)),
    Tiling("rows64_sm90", 64, (64, 64, 4, 4), (128, 64, 4, 4), (41, 72), architectures=(HOPPER,)),
    Tiling("rows128_sm90", 128, (128, 64, 8, 3), (256, 64, 8, 3), (73, 2**30), architectures=(HOPPER,), group_m=4),
    Tiling("rows16_sm80", 16, (32, 128, 4, 3), (64, 128, 4, 3), (1, 32), architectures=(AMPERE, ADA)),
    Tiling("rows64_sm80", 64, (64, 32, 4, 4), (128, 32, 4, 4), (33, 2**30), architectures=(AMPERE, ADA)),
)
GATE_UP = Table(
    Kernel(
        name="moe_gate_up",
        entry=f"{_MODULE}:moe_gate_up_kernel",
        signature={
            "x_ptr": "*T",
            "weight_ptr": "*T",
            "inner_ptr": "*T",
            **_SORTED,
            "x_stride": "i32",
            "expert_stride": "i64",
            "hidden": "i32",
            "intermediate": "i32",
            "top_k": "i32",
        },
        constants=_TILE_CONSTANTS,
        divisible=frozenset(
            ("x_ptr", "weight_ptr", "inner_ptr", "x_stride", "expert_stride", "hidden", "intermediate")
        ),
        chained=True,
    ),
    tuple(tiling.variant("moe_gate_up") for tiling in TILINGS),
)
DOWN = Table(
    Kernel(
        name="moe_down",
        entry=f"{_MODULE}:moe_down_kernel",
        signature={
            "inner_ptr": "*T",
            "weight_ptr": "*T",
            "weights_ptr": "*fp32",
            "outputs_ptr": "*T",
            **_SORTED,
            "expert_stride": "i64",
            "hidden": "i32",
            "intermediate": "i32",
        },
        constants=_TILE_CONSTANTS,
        divisible=frozenset(("inner_ptr", "weight_ptr", "outputs_ptr", "expert_stride", "hidden", "intermediate")),
        chained=True,
    ),
    tuple(tiling.variant("moe_down") for tiling in TILINGS),
)
COMBINE = Table(
    Kernel(
        name="moe_combine",
        entry=f"{_MODULE}:moe_combine_kernel",
        signature={
            "outputs_ptr": "*T",
            "experts_ptr": "*i32",
            "out_ptr": "*T",
            "hidden": "i32",
            "experts": "i32",
            "top_k": "i32",
        },
        constants=("BLOCK", "UNROLL"),
        divisible=frozenset(("outputs_ptr", "out_ptr", "hidden")),
        chained=True,
    ),
    (Variant("moe_combine", "block1024", {"BLOCK": 1024, "UNROLL": 4}, num_warps=4, num_stages=1),),
)


def _few_up_rows() -> tuple[Variant, ...]:
    """Rows for one and for two tokens; from three on the sorted path is as fast (H200)."""
    return tuple(
        Variant(
            "moe_few_gate_up",
            name,
            {"BLOCK_N": columns, "BLOCK_K": depth},
            num_warps=4,
            num_stages=1,
            when={"tokens": (tokens, tokens)},
        )
        for name, tokens, columns, depth in (("one_token", 1, 4, 2048), ("two_tokens", 2, 8, 1024))
    )


def few_down_row(
    name: str,
    *,
    columns: int,
    depth: int,
    blocks: int,
    unroll: int,
    warps: int = 4,
    widths: tuple[int, int] = (1, 2**30),
    tokens: tuple[int, int] = (1, 2),
) -> Variant:
    """A row for intermediate `widths`, which `blocks` of `depth` columns hold, or any where blocks is 0."""
    return Variant(
        "moe_few_down",
        name,
        {"BLOCK_N": columns, "BLOCK_K": depth, "BLOCKS": blocks, "UNROLL": unroll},
        num_warps=warps,
        num_stages=1,
        when={"tokens": tokens, "intermediate": widths},
        # Two registers are kept there on sm_89, outside of the loop.
        stack_bytes=8,
    )


FEW_GATE_UP = Table(
    Kernel(
        name="moe_few_gate_up",
        entry=f"{_MODULE}:moe_few_gate_up_kernel",
        signature={
            "x_ptr": "*T",
            "weight_ptr": "*T",
            "experts_ptr": "*i32",
            "inner_ptr": "*T",
            "x_stride": "i32",
            "expert_stride": "i64",
            "hidden": "i32",
            "intermediate": "i32",
            "experts": "i32",
            "top_k": "i32",
        },
        constants=("BLOCK_N", "BLOCK_K"),
        divisible=frozenset(
            ("x_ptr", "weight_ptr", "inner_ptr", "x_stride", "expert_stride", "hidden", "intermediate")
        ),
        chained=True,
    ),
    _few_up_rows(),
)
FEW_DOWN = Table(
    Kernel(
        name="moe_few_down",
        entry=f"{_MODULE}:moe_few_down_kernel",
        signature={
            "inner_ptr": "*T",
            "weight_ptr": "*T",
            "weights_ptr": "*fp32",
            "experts_ptr": "*i32",
            "out_ptr": "*T",
            "expert_stride": "i64",
            "hidden": "i32",
            "intermediate": "i32",
            "experts": "i32",
            "top_k": "i32",
        },
        constants=("BLOCK_N", "BLOCK_K", "BLOCKS", "UNROLL"),
        divisible=frozenset(("inner_ptr", "weight_ptr", "expert_stride", "hidden", "intermediate")),
        chained=True,
    ),
    (
        few_down_row("width512", columns=4, depth=512, blocks=1, unroll=8, widths=(1, 512)),
        few_down_row("width1536", columns=4, depth=512, blocks=3, unroll=8, widths=(513, 1536), tokens=(1, 1)),
        few_down_row("width1536_two", columns=8, depth=512, blocks=3, unroll=2, widths=(513, 1536)),
        few_down_row("width2048", columns=4, depth=512, blocks=4, unroll=4, widths=(1537, 2048)),
        few_down_row("wide", columns=4, depth=1024, blocks=0, unroll=1),
    ),
)
TABLES = (SORT, GATE_UP, DOWN, COMBINE, FEW_GATE_UP, FEW_DOWN)
PLAN = LaunchPlan(
    "moe_experts",
    (
        Step("moe_sort", ("experts",)),
        Step("moe_gate_up", ("min(pairs, experts + pairs // BLOCK_M) * ceil_div(intermediate, BLOCK_N)",)),
        Step("moe_down", ("min(pairs, experts + pairs // BLOCK_M) * ceil_div(hidden, BLOCK_N)",)),
        Step("moe_combine", ("tokens", "ceil_div(hidden, BLOCK)")),
    ),
    workspaces={
        "sorted": "4 * min(pairs, experts + pairs // BLOCK_M) * BLOCK_M",
        "tile_experts": "4 * min(pairs, experts + pairs // BLOCK_M)",
        "tiles": "4",
        "inner": "element_bytes * min(pairs, experts + pairs // BLOCK_M) * BLOCK_M * intermediate",
        "outputs": "element_bytes * pairs * hidden",
    },
)
"""There are at most one tile a choice, and at most one that is not full an expert."""
FEW_PLAN = LaunchPlan(
    "moe_experts_few",
    (
        Step("moe_few_gate_up", ("pairs", "ceil_div(intermediate, BLOCK_N)")),
        Step("moe_few_down", ("tokens", "ceil_div(hidden, BLOCK_N)")),
    ),
    workspaces={"inner": "element_bytes * pairs * intermediate"},
)
PLANS = (PLAN, FEW_PLAN)
FIXED_LOAD = 64
"""Choices an expert whose tiles serve any number well enough."""


def moe_experts(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    fixed: bool = False,
    tiling: Tiling | None = None,
    few: tuple[Variant, Variant] | None = None,
) -> Tensor:
    """The layer's routed and shared experts.

    x [T, hidden], rows at one stride; weights float32 and experts int32 [T, top_k], contiguous, as `moe_gate` gives
    them, a choice below 0 or not below E skipped; gate_up [E, 2 I, hidden], an expert's gate rows before its up rows,
    and down [E, hidden, I], as checkpoints have them, contiguous but for the first stride. Returns [T, hidden].
    `fixed` takes the same tiles for any number of tokens; `tiling` and `few` force a path.
    """
    tokens, hidden = x.shape
    top_k, intermediate = experts.shape[1], down.shape[2]
    dims = {
        "tokens": tokens,
        "pairs": experts.numel(),
        "experts": gate_up.shape[0],
        "hidden": hidden,
        "intermediate": intermediate,
        "load": FIXED_LOAD if fixed else ceil_div(experts.numel(), gate_up.shape[0]),
        "element_bytes": x.element_size(),
    }
    if (
        few is None
        and tiling is None
        and not fixed
        and all(any(row.fits(dims) for row in t.variants) for t in (FEW_GATE_UP, FEW_DOWN))
    ):
        few = require(FEW_GATE_UP, x, dims), require(FEW_DOWN, x, dims)
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    shared: dict[str, Tensor | int | float] = {
        "x_ptr": x,
        "weights_ptr": weights,
        "experts_ptr": experts,
        "out_ptr": out,
        "x_stride": x.stride(0),
        "hidden": hidden,
        "intermediate": intermediate,
        "experts": dims["experts"],
        "pairs": dims["pairs"],
        "top_k": top_k,
    }
    if few is not None:
        _few(shared, gate_up, down, dims, few)
    else:
        _sorted(shared, gate_up, down, dims, tiling)
    return out


def _few(
    shared: dict[str, Tensor | int | float],
    gate_up: Tensor,
    down: Tensor,
    dims: dict[str, int],
    rows: tuple[Variant, Variant],
) -> None:
    inner = torch.empty(dims["pairs"], dims["intermediate"], dtype=down.dtype, device=down.device)
    for table, step, row, weight in zip((FEW_GATE_UP, FEW_DOWN), FEW_PLAN.steps, rows, (gate_up, down), strict=True):
        arguments = shared | {"inner_ptr": inner, "weight_ptr": weight, "expert_stride": weight.stride(0)}
        launcher.launch(table.kernel, row, step.blocks(dims, row), arguments)


def _sorted(
    shared: dict[str, Tensor | int | float],
    gate_up: Tensor,
    down: Tensor,
    dims: dict[str, int],
    tiling: Tiling | None,
) -> None:
    device, dtype = down.device, down.dtype
    up_row, down_row = (
        tiling.variant(table.kernel.name) if tiling else require(table, down, dims) for table in (GATE_UP, DOWN)
    )
    rows = up_row.constants["BLOCK_M"]
    sizes = PLAN.workspace_bytes(dims, up_row.constants)
    sort_row = require(SORT, down, dims | {"block_m": rows})
    combine_row = require(COMBINE, down, dims)
    arguments = shared | {
        "sorted_ptr": torch.empty(sizes["sorted"] // 4, dtype=torch.int32, device=device),
        "tile_experts_ptr": torch.empty(sizes["tile_experts"] // 4, dtype=torch.int32, device=device),
        "tiles_ptr": torch.empty(1, dtype=torch.int32, device=device),
        "inner_ptr": torch.empty(sizes["inner"] // dims["element_bytes"], dtype=dtype, device=device),
        "outputs_ptr": torch.empty(sizes["outputs"] // dims["element_bytes"], dtype=dtype, device=device),
    }
    chosen = (sort_row, up_row, down_row, combine_row)
    for table, step, row, weight in zip(
        (SORT, GATE_UP, DOWN, COMBINE), PLAN.steps, chosen, (gate_up, gate_up, down, down), strict=True
    ):
        values = arguments | {"weight_ptr": weight, "expert_stride": weight.stride(0)}
        launcher.launch(table.kernel, row, step.blocks(dims, row), values)
