# mypy: disable-error-code="no-untyped-def"
# Device functions have no types that mypy knows.
"""The experts of a mixture-of-experts layer with weights of four bits, on a GPU.

    out[t] = sum_k weights[t, k] W_down[e] (silu(W_gate[e] x[t]) * W_up[e] x[t]),     e = experts[t, k] >= 0

as `moe_triton.py`, whose sorting and last sum these share, with weights as `int4_gemm.py` has them: tiles are unpacked
on their way to the tensor cores, as in `int4_gemm_triton.py`. hidden and intermediate are whole blocks of 32 columns.
On sm_90 the kernels of `int4_rows_gluon.py` stand in for both products while an expert has up to 32 choices on average.

Bytes: half an element of each expert touched, and its scales and zeros. Few tokens are bound by them.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_engine.kernels import launcher
from deepseek_engine.kernels.chaining import follow
from deepseek_engine.kernels.dispatch import find, require
from deepseek_engine.kernels.int4_gemm_triton import (
    BLOCK_COLUMNS,
    ROWS_CONSTANTS,
    ROWS_MODULE,
    eights,
    group_shift,
    in_registers,
    is_blocked,
    unpack_tile,
)
from deepseek_engine.kernels.moe_triton import COMBINE, PLAN, SORT, silu_times, tile_of
from deepseek_engine.kernels.variants import Kernel, LaunchPlan, Step, Table, Variant, ceil_div


@triton.jit
def moe_gate_up_int4_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    zeros_ptr,
    inner_ptr,
    sorted_ptr,
    tile_experts_ptr,
    tiles_ptr,
    blocks,
    groups,
    group_size,
    zero_row,
    zero_step,
    intermediate,
    top_k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """inner[place] = silu(gate) * up for every place of the sorted pairs."""
    follow(CHAINED)
    row_tiles = tl.load(tiles_ptr)
    columns = tl.cdiv(intermediate, BLOCK_N)
    if tl.program_id(0) < row_tiles * columns:
        hidden = blocks * 32
        tile, column_tile = tile_of(columns, row_tiles, GROUP_M)
        expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
        place = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        pair = tl.load(sorted_ptr + place)
        real = pair >= 0
        n = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        h = tl.arange(0, BLOCK_K // 2)
        part = tl.arange(0, BLOCK_K // 32) * 32
        wanted = n < intermediate
        x_rows = x_ptr + tl.where(real, pair // top_k, 0).to(tl.int64)[None, :] * hidden
        # Columns past the last read a real one, and are dropped when the tile is stored.
        row = (expert * 2 * intermediate + tl.where(wanted, n, 0).to(tl.int64))[:, None]
        up_row = row + intermediate
        gate = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        group = (part // group_size)[None, :]
        inside = group < groups
        s = tl.load(scales_ptr + row * groups + group, mask=inside, other=0.0)
        z = tl.load(zeros_ptr + row * zero_row + group * zero_step, mask=inside, other=0)
        s_up = tl.load(scales_ptr + up_row * groups + group, mask=inside, other=0.0)
        z_up = tl.load(zeros_ptr + up_row * zero_row + group * zero_step, mask=inside, other=0)
        for start in tl.range(0, hidden, BLOCK_K):
            column = start + k
            half = start // 2 + h
            held = (half < blocks * 16)[None, :]
            x = tl.load(x_rows + column[:, None], mask=(column < hidden)[:, None] & real[None, :], other=0.0)
            w = tl.load(weight_ptr + row * (blocks * 16) + half[None, :], mask=held, other=0)
            w_up = tl.load(weight_ptr + up_row * (blocks * 16) + half[None, :], mask=held, other=0)
            gate = tl.dot(unpack_tile(w, s, z, x_ptr, BLOCK_N, BLOCK_K), x, gate, input_precision="ieee")
            up = tl.dot(unpack_tile(w_up, s_up, z_up, x_ptr, BLOCK_N, BLOCK_K), x, up, input_precision="ieee")
            group = ((start + BLOCK_K) // group_size + part // group_size)[None, :]
            inside = group < groups
            s = tl.load(scales_ptr + row * groups + group, mask=inside, other=0.0)
            z = tl.load(zeros_ptr + row * zero_row + group * zero_step, mask=inside, other=0)
            s_up = tl.load(scales_ptr + up_row * groups + group, mask=inside, other=0.0)
            z_up = tl.load(zeros_ptr + up_row * zero_row + group * zero_step, mask=inside, other=0)
        inner = silu_times(gate, up).to(inner_ptr.dtype.element_ty)
        target = inner_ptr + place.to(tl.int64)[None, :] * intermediate + n[:, None]
        tl.store(target, inner, mask=real[None, :] & wanted[:, None])


@triton.jit
def moe_down_int4_kernel(
    inner_ptr,
    weight_ptr,
    scales_ptr,
    zeros_ptr,
    weights_ptr,
    outputs_ptr,
    sorted_ptr,
    tile_experts_ptr,
    tiles_ptr,
    blocks,
    groups,
    group_size,
    zero_row,
    zero_step,
    hidden,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """outputs[pair] = weights[pair] * (W_down inner[place])."""
    follow(CHAINED)
    row_tiles = tl.load(tiles_ptr)
    columns = tl.cdiv(hidden, BLOCK_N)
    if tl.program_id(0) < row_tiles * columns:
        intermediate = blocks * 32
        tile, column_tile = tile_of(columns, row_tiles, GROUP_M)
        expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
        place = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        pair = tl.load(sorted_ptr + place)
        real = pair >= 0
        n = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        h = tl.arange(0, BLOCK_K // 2)
        part = tl.arange(0, BLOCK_K // 32) * 32
        wanted = n < hidden
        weight = tl.load(weights_ptr + pair, mask=real, other=0.0)
        inner_rows = inner_ptr + place.to(tl.int64)[None, :] * intermediate
        row = (expert * hidden + tl.where(wanted, n, 0).to(tl.int64))[:, None]
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        group = (part // group_size)[None, :]
        s = tl.load(scales_ptr + row * groups + group, mask=group < groups, other=0.0)
        z = tl.load(zeros_ptr + row * zero_row + group * zero_step, mask=group < groups, other=0)
        for start in tl.range(0, intermediate, BLOCK_K):
            column = start + k
            half = start // 2 + h
            x = tl.load(inner_rows + column[:, None], mask=(column < intermediate)[:, None] & real[None, :], other=0.0)
            held = (half < blocks * 16)[None, :]
            w = tl.load(weight_ptr + row * (blocks * 16) + half[None, :], mask=held, other=0)
            acc = tl.dot(unpack_tile(w, s, z, inner_ptr, BLOCK_N, BLOCK_K), x, acc, input_precision="ieee")
            group = ((start + BLOCK_K) // group_size + part // group_size)[None, :]
            s = tl.load(scales_ptr + row * groups + group, mask=group < groups, other=0.0)
            z = tl.load(zeros_ptr + row * zero_row + group * zero_step, mask=group < groups, other=0)
        acc = (acc * weight[None, :]).to(outputs_ptr.dtype.element_ty)
        target = outputs_ptr + pair.to(tl.int64)[None, :] * hidden + n[:, None]
        tl.store(target, acc, mask=real[None, :] & wanted[:, None])


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tiles of both products for a range of choices an expert gets on average."""

    name: str
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    load: tuple[int, int]
    """Choices an expert, rounded up."""

    def variant(self, kernel: str) -> Variant:
        return Variant(
            kernel,
            self.name,
            {"BLOCK_M": self.rows, "BLOCK_N": self.columns, "BLOCK_K": self.depth, "GROUP_M": 8},
            num_warps=self.warps,
            num_stages=self.stages,
            when={"load": self.load},
            wide_tiles=True,
        )


TILINGS = (
    Tiling("rows16", 16, 64, 128, 4, 3, (1, 16)),
    Tiling("rows64", 64, 64, 64, 4, 3, (17, 2**30)),
)
_MODULE = "deepseek_engine.kernels.moe_int4_triton"
_PACKED = {"weight_ptr": "*u8", "scales_ptr": "*T", "zeros_ptr": "*u8"}
_SORTED = {"sorted_ptr": "*i32", "tile_experts_ptr": "*i32", "tiles_ptr": "*i32"}
_SIZES = {"blocks": "i32", "groups": "i32", "group_size": "i32", "zero_row": "i32", "zero_step": "i32"}
_CONSTANTS = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M")
GATE_UP_INT4 = Table(
    Kernel(
        name="moe_gate_up_int4",
        entry=f"{_MODULE}:moe_gate_up_int4_kernel",
        signature={
            "x_ptr": "*T",
            **_PACKED,
            "inner_ptr": "*T",
            **_SORTED,
            **_SIZES,
            "intermediate": "i32",
            "top_k": "i32",
        },
        constants=_CONSTANTS,
        divisible=frozenset(("x_ptr", "weight_ptr", "inner_ptr", "intermediate")),
        chained=True,
    ),
    tuple(tiling.variant("moe_gate_up_int4") for tiling in TILINGS),
)
DOWN_INT4 = Table(
    Kernel(
        name="moe_down_int4",
        entry=f"{_MODULE}:moe_down_int4_kernel",
        signature={
            "inner_ptr": "*T",
            **_PACKED,
            "weights_ptr": "*fp32",
            "outputs_ptr": "*T",
            **_SORTED,
            **_SIZES,
            "hidden": "i32",
        },
        constants=_CONSTANTS,
        divisible=frozenset(("inner_ptr", "weight_ptr", "outputs_ptr", "hidden")),
        chained=True,
    ),
    tuple(tiling.variant("moe_down_int4") for tiling in TILINGS),
)
_SHIFTED = {"blocks": "i32", "groups": "i32", "group_shift": "i32", "zero_row": "i32", "zero_step": "i32"}
GATE_UP_INT4_ROWS = Table(
    Kernel(
        name="moe_gate_up_int4_rows",
        entry=f"{ROWS_MODULE}:moe_gate_up_int4_rows_kernel",
        signature={
            "x_ptr": "*T",
            **_PACKED,
            "weight_ptr": "*i32",
            "inner_ptr": "*T",
            **_SORTED,
            **_SHIFTED,
            "intermediate": "i32",
            "top_k": "i32",
        },
        constants=ROWS_CONSTANTS,
        divisible=frozenset(("x_ptr", "weight_ptr")),
        chained=True,
    ),
    (
        in_registers("moe_gate_up_int4_rows", (8, 16, 2, 1), load=(1, 7)),
        in_registers("moe_gate_up_int4_rows", (16, 32, 2, 1), load=(8, 32)),
    ),
)
DOWN_INT4_ROWS = Table(
    Kernel(
        name="moe_down_int4_rows",
        entry=f"{ROWS_MODULE}:moe_down_int4_rows_kernel",
        signature={
            "inner_ptr": "*T",
            **_PACKED,
            "weight_ptr": "*i32",
            "weights_ptr": "*fp32",
            "outputs_ptr": "*T",
            **_SORTED,
            **_SHIFTED,
            "hidden": "i32",
        },
        constants=ROWS_CONSTANTS,
        divisible=frozenset(("inner_ptr", "weight_ptr")),
        chained=True,
    ),
    (
        in_registers("moe_down_int4_rows", (8, 32, 2, 1), load=(1, 7)),
        in_registers("moe_down_int4_rows", (16, 64, 2, 1), load=(8, 32)),
    ),
)
_TILED, _IN_REGISTERS = (GATE_UP_INT4, DOWN_INT4), (GATE_UP_INT4_ROWS, DOWN_INT4_ROWS)
"""Both products; the second pair is launched in the first one's place, with its grids."""
TABLES = (*_TILED, *_IN_REGISTERS)
_SORT, _UP, _DOWN, _COMBINE = PLAN.steps
INT4_PLAN = LaunchPlan(
    "moe_experts_int4",
    (_SORT, Step("moe_gate_up_int4", _UP.grid), Step("moe_down_int4", _DOWN.grid), _COMBINE),
    workspaces=PLAN.workspaces,
)
PLANS = (INT4_PLAN,)


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """Weights [E, N, K]: q uint8 [E, N, K / 2]; scales [E, N, K / group_size]; zeros uint8 as scales, 8 if absent."""

    q: Tensor
    scales: Tensor
    zeros: Tensor | None = None


def moe_experts_int4(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: PackedExperts, down: PackedExperts, *, group_size: int
) -> Tensor:
    """The layer's routed and shared experts, as `moe_triton.moe_experts` has them.

    x [T, hidden], contiguous; weights float32 and experts int32 [T, top_k], contiguous, a choice below 0 or not below E
    skipped; gate_up [E, 2 I, hidden], an expert's gate rows before its up rows, and down [E, hidden, I]. Returns
    [T, hidden].

    Raises:
        ValueError: hidden or I is not whole blocks of 32 columns, or a group is not 32, 64 or 128 columns.
    """
    tokens, hidden = x.shape
    count, intermediate = gate_up.q.shape[0], gate_up.q.shape[1] // 2
    if not is_blocked(hidden, group_size) or not is_blocked(intermediate, group_size):
        raise ValueError(
            f"packed experts of {hidden} and {intermediate} columns in groups of {group_size}: the kernels take whole"
            " blocks of 32 columns in groups of 32, 64 or 128"
        )
    dims = {
        "tokens": tokens,
        "pairs": experts.numel(),
        "experts": count,
        "hidden": hidden,
        "intermediate": intermediate,
        "load": ceil_div(experts.numel(), count),
        "element_bytes": x.element_size(),
    }
    in_place = not launcher.interpreting() and all(find(table, x, dims) for table in _IN_REGISTERS)
    tables = _IN_REGISTERS if in_place else _TILED
    up_row, down_row = (require(table, x, dims) for table in tables)
    rows = up_row.constants["BLOCK_M"]
    sizes = INT4_PLAN.workspace_bytes(dims, up_row.constants)
    scratch = {
        name: torch.empty(sizes[name] // dtype.itemsize, dtype=dtype, device=x.device)
        for name, dtype in (
            ("sorted", torch.int32),
            ("tile_experts", torch.int32),
            ("tiles", torch.int32),
            ("inner", x.dtype),
            ("outputs", x.dtype),
        )
    }
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    shared: dict[str, Tensor | int | float] = {
        "x_ptr": x,
        "weights_ptr": weights,
        "experts_ptr": experts,
        "out_ptr": out,
        **{f"{name}_ptr": tensor for name, tensor in scratch.items()},
        "hidden": hidden,
        "intermediate": intermediate,
        "experts": count,
        "pairs": dims["pairs"],
        "top_k": experts.shape[1],
        "group_size": group_size,
        "group_shift": group_shift(group_size),
    }
    chosen = (require(SORT, x, dims | {"block_m": rows}), up_row, down_row, require(COMBINE, x, dims))
    # Sorting and the last sum read no weights.
    packed = (shared, _packed(gate_up, hidden), _packed(down, intermediate), shared)
    for table, step, row, own in zip((SORT, *tables, COMBINE), INT4_PLAN.steps, chosen, packed, strict=True):
        launcher.launch(table.kernel, row, step.blocks(dims, row), shared | own)
    return out


def _packed(experts: PackedExperts, columns: int) -> dict[str, Tensor | int | float]:
    groups = experts.scales.shape[2]
    return {
        "weight_ptr": experts.q,
        "scales_ptr": experts.scales,
        "zeros_ptr": eights(experts.q.device) if experts.zeros is None else experts.zeros,
        "blocks": columns // BLOCK_COLUMNS,
        "groups": groups,
        "zero_row": 0 if experts.zeros is None else groups,
        "zero_step": 0 if experts.zeros is None else 1,
    }
