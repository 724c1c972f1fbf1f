# mypy: disable-error-code="no-untyped-def"
# Device functions have no types that mypy knows.
"""The product of a block-sparse matrix with a dense one on a GPU; the reference is `block_sparse_gemm.py`.

    C = (A where its 8 x 8 blocks are present, else 0) B

`tiled_mask.py` groups the 8 x 8 blocks to tiles for the tensor cores, BLOCK_M x BLOCK_K: eight-row groups of A with
similar patterns share a tile row, and a tile none of whose blocks is present is not visited. A tile that is wholly
present is copied as it is; of any other only the present blocks are, 16 bytes a row of a block, and zeros stand for the
rest, whatever A holds there. Tile rows come with the most tiles first. Lists and bits are loaded a step ahead, as in
`block_sparse_attention_triton.py`.

Operations: 2 N elements of the tiles that are present. Bound by arithmetic; A's present tiles are read N / BLOCK_N
times, mostly out of the cache, which GROUP_M tile rows share with one tile of B.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_engine.kernels import launcher
from deepseek_engine.kernels.block_lists import SCHEDULE_WIDTH
from deepseek_engine.kernels.dispatch import require
from deepseek_engine.kernels.moe_triton import tile_of
from deepseek_engine.kernels.tiled_mask import TiledMask
from deepseek_engine.kernels.variants import ADA, AMPERE, HOPPER, Kernel, LaunchPlan, Step, Table, Variant

WORK = tl.constexpr(SCHEDULE_WIDTH)


@triton.jit
def multiply_listed(
    acc,
    a_ptr,
    b_ptr,
    a_rows,
    group,
    n,
    list_ptr,
    bits_ptr,
    tile,
    bits,
    begin,
    end,
    columns,
    depth,
    b_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The tiles list[begin : end] of a tile row; of MASKED ones only the blocks that have a bit count.

    tile and bits are those of the first. Past the end stand spare entries, so that no load a step ahead needs a mask.
    """
    GROUPS: tl.constexpr = BLOCK_M // 8
    k = tl.arange(0, BLOCK_K)
    a_tile = a_rows[:, None] + k[None, :]
    b_tile = (k * b_stride)[:, None] + n[None, :]
    wanted = (n < columns)[None, :]
    for place in tl.range(begin, end):
        first = (tile * BLOCK_K).to(tl.int64)
        if MASKED:
            shown = ((bits[:, None] >> (k // 8)[None, :]) & 1) != 0
            a = tl.load(a_ptr + first + a_tile, mask=shown, other=0.0)
            inside = (tile * BLOCK_K + k < depth)[:, None]
            b = tl.load(b_ptr + first * b_stride + b_tile, mask=inside & wanted, other=0.0)
        else:
            a = tl.load(a_ptr + first + a_tile)
            b = tl.load(b_ptr + first * b_stride + b_tile, mask=wanted, other=0.0)
        tile = tl.load(list_ptr + place + 1)
        if MASKED:
            bits = tl.load(bits_ptr + (place + 1) * GROUPS + group)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def block_sparse_gemm_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    groups_ptr,
    schedule_ptr,
    full_ptr,
    partial_ptr,
    bits_ptr,
    a_stride,
    b_stride,
    rows,
    columns,
    depth,
    row_tiles,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    row_tile, column_tile = tile_of(tl.cdiv(columns, BLOCK_N), row_tiles, GROUP_M)
    work = schedule_ptr + row_tile * WORK
    full_begin = tl.load(work + 1)
    full_end = tl.load(work + 2)
    partial_begin = tl.load(work + 3)
    partial_end = tl.load(work + 4)
    full_tile = tl.load(work + 5)
    partial_tile = tl.load(work + 6)
    m = tl.arange(0, BLOCK_M)
    group = m // 8
    # Before the first loop, so that the second one waits for nothing but its tiles.
    bits = tl.load(bits_ptr + partial_begin * (BLOCK_M // 8) + group)
    row = tl.load(groups_ptr + row_tile * (BLOCK_M // 8) + group) * 8 + m % 8
    valid = row < rows
    # Rows past the last read a real one, and are dropped when the tile is stored.
    a_rows = tl.where(valid, row, 0).to(tl.int64) * a_stride
    n = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    acc = multiply_listed(
        acc,
        a_ptr,
        b_ptr,
        a_rows,
        group,
        n,
        full_ptr,
        bits_ptr,
        full_tile,
        bits,
        full_begin,
        full_end,
        columns,
        depth,
        b_stride,
        BLOCK_M,
        BLOCK_K,
        False,
    )
    acc = multiply_listed(
        acc,
        a_ptr,
        b_ptr,
        a_rows,
        group,
        n,
        partial_ptr,
        bits_ptr,
        partial_tile,
        bits,
        partial_begin,
        partial_end,
        columns,
        depth,
        b_stride,
        BLOCK_M,
        BLOCK_K,
        True,
    )
    tl.store(
        c_ptr + (row.to(tl.int64) * columns)[:, None] + n[None, :],
        acc.to(c_ptr.dtype.element_ty),
        mask=valid[:, None] & (n < columns)[None, :],
    )


_MODULE = "deepseek_engine.kernels.block_sparse_gemm_triton"


def variant(
    name: str,
    tile: tuple[int, int],
    columns: int,
    warps: int,
    stages: int,
    architectures: tuple[int, ...],
    group: int = 8,
) -> Variant:
    """A row for masks that are grouped to exactly this `tile`, rows and depth."""
    rows, depth = tile
    return Variant(
        "block_sparse_gemm",
        name,
        {"BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": depth, "GROUP_M": group},
        num_warps=warps,
        num_stages=stages,
        architectures=architectures,
        when={"tile_rows": (rows, rows), "tile_depth": (depth, depth)},
        wide_tiles=rows >= 64,
    )


BLOCK_SPARSE_GEMM = Table(
    Kernel(
        name="block_sparse_gemm",
        entry=f"{_MODULE}:block_sparse_gemm_kernel",
        signature={
            "a_ptr": "*T",
            "b_ptr": "*T",
            "c_ptr": "*T",
            **dict.fromkeys(("groups_ptr", "schedule_ptr", "full_ptr", "partial_ptr", "bits_ptr"), "*i32"),
            "a_stride": "i32",
            "b_stride": "i32",
            "rows": "i32",
            "columns": "i32",
            "depth": "i32",
            "row_tiles": "i32",
        },
        constants=("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M"),
        divisible=frozenset(("a_ptr", "b_ptr", "c_ptr", "a_stride", "b_stride", "columns")),
    ),
    (
        variant("sm90", (128, 64), 256, 8, 4, (HOPPER,)),
        variant("sm90_fine", (64, 64), 256, 8, 4, (HOPPER,)),
        variant("sm80", (128, 64), 128, 8, 3, (AMPERE,)),
        variant("sm80_fine", (64, 64), 128, 8, 3, (AMPERE,)),
        variant("sm89", (128, 64), 128, 8, 2, (ADA,)),
        variant("sm89_fine", (64, 64), 128, 8, 3, (ADA,)),
    ),
)
TABLES = (BLOCK_SPARSE_GEMM,)
PLAN = LaunchPlan("block_sparse_gemm", (Step("block_sparse_gemm", ("row_tiles * ceil_div(columns, BLOCK_N)",)),))
PLANS = (PLAN,)


def block_sparse_gemm(a: Tensor, b: Tensor, mask: TiledMask, *, row: Variant | None = None) -> Tensor:
    """(a where its 8 x 8 blocks are present, else 0) b.

    a [M, K] and b [K, N], rows at any stride that is a multiple of 8, as are K and N; `mask` of an M x K matrix.
    Returns [M, N] of a's dtype, summed in float32.

    Raises:
        ValueError: the shapes do not belong together.
        NoVariantError: no row is declared for the mask's tiles on this device.
    """
    (rows, depth), columns = a.shape, b.shape[1]
    if (mask.rows, mask.depth) != (rows, depth) or b.shape[0] != depth:
        raise ValueError(f"a {tuple(a.shape)}, b {tuple(b.shape)} and a mask of {mask.rows} x {mask.depth} do not fit")
    if columns % 8 or a.stride(1) != 1 or b.stride(1) != 1:
        raise ValueError(f"b has {columns} columns; pad them to a multiple of 8, and have the last stride of both be 1")
    out = torch.empty(rows, columns, dtype=a.dtype, device=a.device)
    dims = {
        "tile_rows": mask.tile_rows,
        "tile_depth": mask.tile_depth,
        "row_tiles": mask.row_tiles,
        "columns": columns,
    }
    chosen = row or require(BLOCK_SPARSE_GEMM, a, dims)
    launcher.launch(
        BLOCK_SPARSE_GEMM.kernel,
        chosen,
        PLAN.steps[0].blocks(dims, chosen),
        {
            "a_ptr": a,
            "b_ptr": b,
            "c_ptr": out,
            "groups_ptr": mask.groups,
            "schedule_ptr": mask.schedule,
            "full_ptr": mask.full.blocks,
            "partial_ptr": mask.partial.blocks,
            "bits_ptr": mask.bits,
            "a_stride": a.stride(0),
            "b_stride": b.stride(0),
            "rows": rows,
            "columns": columns,
            "depth": depth,
            "row_tiles": mask.row_tiles,
        },
    )
    return out
