# mypy: disable-error-code="no-untyped-def"
# Device functions have no types that mypy knows.
"""Products with e4m3 weights in scaled blocks on a GPU; the reference is `fp8_block_gemm.py`.

    out = x w^T + bias + residual,    w[n, k] = e4m3(weight[n, k]) * scale_inv[n // block_rows, k // block_columns]

(DeepSeek-V3, arXiv:2412.19437, section 3.3.2; activations are not quantised here.) Half types hold every e4m3 value, so
a weight is decoded exactly and its block's scale multiplies a float32 sum. sm_89 and newer decode by an instruction,
sm_80 by moving bits. One row is a matrix-vector product, more rows run on the tensor cores with the weight as the wide
side; K is split where tiles are too few for the card, as in `int4_gemm_triton.py`. Both take blocks that hold whole
tiles; a third kernel takes any blocks, and is several times slower. For many rows the weight is unpacked into scratch
memory, part by part, and the library multiplies.

Bound by memory for few rows: each byte of the weight is read once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_engine.kernels.chaining import follow
from deepseek_engine.kernels.packed_product import Arguments, PackedKernels, Tiling
from deepseek_engine.kernels.split_sum_triton import store_row
from deepseek_engine.kernels.variants import ADA, AMPERE, HOPPER, Kernel, LaunchPlan, Step, Table, Variant

CHUNK = 16
"""Columns that rows of the weight are whole multiples of, in the kernels for blocks that hold whole tiles."""
TILE_ROWS, TILE_COLUMNS = 128, 128
"""What blocks are multiples of there: no tile lies in two."""


@triton.jit
def decode_e4m3(w, TYPE: tl.constexpr, NATIVE: tl.constexpr):
    """uint8 e4m3 bytes in a float type, exactly."""
    if NATIVE:
        made = w.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(TYPE)
    else:
        # Exponent and mantissa move to their places in a float16, whose bias is 8 larger.
        bits = ((w & 0x7F).to(tl.int16) << 7) | ((w & 0x80).to(tl.int16) << 8)
        value = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        made = tl.where((w & 0x7F) == 0x7F, float("nan"), value).to(TYPE)
    return made


@triton.jit
def fp8_gemv_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    columns,
    chunks,
    scales,
    block_rows,
    column_shift,
    with_bias,
    with_residual,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK)
    eight = tl.arange(0, 8)
    wanted = n < columns
    near = tl.where(wanted, n, 0).to(tl.int64)
    # Eights of columns, of which a thread reads one at a time.
    eights = chunks * 2
    w_rows = weight_ptr + (near * (chunks * 16))[None, None, :] + eight[None, :, None]
    s_row = scale_ptr + (tl.program_id(0) * BLOCK_N // block_rows).to(tl.int64) * scales
    # A block of the weight is asked for ahead of its product, the first while the kernel before still runs.
    ahead = tl.minimum(lane, eights - 1)
    w = tl.load(w_rows + (ahead * 8)[:, None, None])
    s = tl.load(s_row + (ahead >> column_shift))
    follow(CHAINED)
    acc = tl.zeros((BLOCK, BLOCK_N), dtype=tl.float32)
    acc_1 = tl.zeros((BLOCK, BLOCK_N), dtype=tl.float32)
    for start in tl.range(0, eights, BLOCK):
        place = start + lane
        inside = (place < eights)[:, None]
        column = place[:, None] * 8 + eight[None, :]
        x = tl.load(x_ptr + column, mask=inside, other=0.0)
        f = decode_e4m3(w, tl.float32, NATIVE)
        acc += tl.sum(f * x.to(tl.float32)[:, :, None], axis=1) * s[:, None]
        if ROWS == 2:
            x = tl.load(x_ptr + chunks * 16 + column, mask=inside, other=0.0)
            acc_1 += tl.sum(f * x.to(tl.float32)[:, :, None], axis=1) * s[:, None]
        ahead = tl.minimum(place + BLOCK, eights - 1)
        w = tl.load(w_rows + (ahead * 8)[:, None, None])
        s = tl.load(s_row + (ahead >> column_shift))
    store_row(tl.sum(acc, axis=0), bias_ptr, residual_ptr, out_ptr, n, wanted, with_bias, with_residual)
    if ROWS == 2:
        second = tl.sum(acc_1, axis=0)
        store_row(second, bias_ptr, residual_ptr + columns, out_ptr + columns, n, wanted, with_bias, with_residual)


@triton.jit
def fp8_gemm_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    part_ptr,
    rows,
    columns,
    chunks,
    scales,
    block_rows,
    block_columns,
    with_bias,
    with_residual,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    NATIVE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
    depth = chunks * 16
    tile = tl.program_id(0)
    split = tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    wanted = n < columns
    real = m < rows
    x_rows = x_ptr + m.to(tl.int64)[None, :] * depth
    w_rows = weight_ptr + tl.where(wanted, n, 0).to(tl.int64)[:, None] * depth
    s_row = scale_ptr + (tile * BLOCK_N // block_rows).to(tl.int64) * scales
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    steps = tl.cdiv(tl.cdiv(depth, BLOCK_K), SPLITS)
    first = split * steps
    last = tl.minimum(first + steps, tl.cdiv(depth, BLOCK_K))
    s = tl.load(s_row + first * BLOCK_K // block_columns, mask=first < last, other=0.0)
    for step in tl.range(first, last):
        column = step * BLOCK_K + k
        inside = column < depth
        x = tl.load(x_rows + column[:, None], mask=inside[:, None] & real[None, :], other=0.0)
        w = tl.load(w_rows + column[None, :], mask=inside[None, :], other=0)
        acc += tl.dot(decode_e4m3(w, x_ptr.dtype.element_ty, NATIVE), x, input_precision="ieee") * s
        s = tl.load(s_row + (step + 1) * BLOCK_K // block_columns, mask=step + 1 < last, other=0.0)
    mask = wanted[:, None] & real[None, :]
    target = m.to(tl.int64)[None, :] * columns + n[:, None]
    if SPLITS == 1:
        acc += tl.load(bias_ptr + n, mask=wanted & (with_bias != 0), other=0.0).to(tl.float32)[:, None]
        acc += tl.load(residual_ptr + target, mask=mask & (with_residual != 0), other=0.0).to(tl.float32)
        tl.store(out_ptr + target, acc.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        base = part_ptr + split.to(tl.int64) * rows * columns
        tl.store(base + target, acc, mask=mask)


@triton.jit
def fp8_unpack_kernel(
    weight_ptr,
    scale_ptr,
    out_ptr,
    first,
    chunks,
    scales,
    block_rows,
    block_columns,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """BLOCK chunks of a row of the weight from `first` on, as the half type has them."""
    follow(CHAINED)
    depth = chunks * 16
    place = tl.program_id(0).to(tl.int64)
    row = first + place
    chunk = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (chunk < chunks)[:, None]
    column = chunk[:, None] * 16 + tl.arange(0, 16)[None, :]
    w = tl.load(weight_ptr + row * depth + column, mask=inside, other=0)
    block = chunk * 16 // block_columns
    s = tl.load(scale_ptr + row // block_rows * scales + block, mask=chunk < chunks, other=0.0)[:, None]
    f = (decode_e4m3(w, tl.float32, NATIVE) * s).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place * depth + column, f, mask=inside)


@triton.jit
def fp8_any_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    rows,
    columns,
    depth,
    scales,
    block_rows,
    block_columns,
    with_bias,
    with_residual,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NATIVE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    wanted = n < columns
    real = m < rows
    near = tl.where(wanted, n, 0).to(tl.int64)
    x_rows = x_ptr + m.to(tl.int64)[None, :] * depth
    s_rows = scale_ptr + near // block_rows * scales
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    pieces = tl.cdiv(block_columns, BLOCK_K)
    for step in tl.range(0, scales * pieces):
        block = step // pieces
        column = block * block_columns + (step % pieces) * BLOCK_K + k
        inside = column < tl.minimum(depth, (block + 1) * block_columns)
        x = tl.load(x_rows + column[:, None], mask=inside[:, None] & real[None, :], other=0.0)
        w = tl.load(weight_ptr + near[:, None] * depth + column[None, :], mask=inside[None, :], other=0)
        s = tl.load(s_rows + block)[:, None]
        acc += tl.dot(decode_e4m3(w, x_ptr.dtype.element_ty, NATIVE), x, input_precision="ieee") * s
    mask = wanted[:, None] & real[None, :]
    target = m.to(tl.int64)[None, :] * columns + n[:, None]
    acc += tl.load(bias_ptr + n, mask=wanted & (with_bias != 0), other=0.0).to(tl.float32)[:, None]
    acc += tl.load(residual_ptr + target, mask=mask & (with_residual != 0), other=0.0).to(tl.float32)
    tl.store(out_ptr + target, acc.to(out_ptr.dtype.element_ty), mask=mask)


_DECODERS = ((1, "", (ADA, HOPPER)), (0, "_sm80", (AMPERE,)))
"""NATIVE, what a row's name ends with, and where."""


def gemv_variant(
    name: str,
    columns: int,
    block: int,
    warps: int,
    native: int = 1,
    architectures: tuple[int, ...] = (ADA, HOPPER),
    rows: int = 1,
    reach: tuple[int, int] = (1, 2**30),
) -> Variant:
    """`columns` rows of the weight a program, `block` eights of columns of it at a time."""
    return Variant(
        "fp8_gemv",
        name,
        {"ROWS": rows, "BLOCK_N": columns, "BLOCK": block, "NATIVE": native},
        num_warps=warps,
        num_stages=1,
        architectures=architectures,
        when={"rows": (rows, rows), "columns": reach},
    )


_MODULE = "deepseek_engine.kernels.fp8_block_gemm_triton"
_TENSORS = {
    "x_ptr": "*T",
    "weight_ptr": "*u8",
    "scale_ptr": "*fp32",
    "bias_ptr": "*T",
    "residual_ptr": "*T",
    "out_ptr": "*T",
}
_ADDED = {"with_bias": "i32", "with_residual": "i32"}
FP8_GEMV = Table(
    Kernel(
        name="fp8_gemv",
        entry=f"{_MODULE}:fp8_gemv_kernel",
        signature={
            **_TENSORS,
            "columns": "i32",
            "chunks": "i32",
            "scales": "i32",
            "block_rows": "i32",
            "column_shift": "i32",
            **_ADDED,
        },
        constants=("ROWS", "BLOCK_N", "BLOCK", "NATIVE"),
        divisible=frozenset(("x_ptr", "weight_ptr")),
        chained=True,
    ),
    tuple(
        gemv_variant(f"{name}{suffix}", columns, block, warps, native, architectures, rows, reach)
        for native, suffix, architectures in _DECODERS
        for name, columns, block, warps, rows, reach in (
            # Few programs are made wide, so that they still fill the card.
            ("few_columns", 8, 256, 8, 1, (1, 3071)),
            ("columns", 4, 128, 4, 1, (3072, 2**30)),
            ("two_rows_few_columns", 4, 256, 4, 2, (1, 3071)),
            ("two_rows", 8, 128, 4, 2, (3072, 2**30)),
        )
    ),
)
TILINGS = tuple(
    Tiling(
        f"{name}{suffix}",
        rows,
        columns,
        depth,
        splits,
        warps,
        stages,
        reach,
        tiles,
        architectures,
        # Without the instruction that decodes, the largest tile has four words too many for its registers.
        stack_bytes=0 if native or rows * depth < 64 * 128 else 16,
        constants={"NATIVE": native},
    )
    for native, suffix, architectures in _DECODERS
    for name, rows, columns, depth, splits, warps, stages, reach, tiles in (
        ("rows16_split8", 16, 64, 128, 8, 4, 3, (1, 16), (1, 159)),
        ("rows16_split2", 16, 128, 128, 2, 4, 3, (1, 16), (160, 2**30)),
        ("rows64_split4", 64, 64, 64, 4, 4, 3, (17, 64), (1, 131)),
        ("rows64", 64, 64, 128, 1, 4, 3, (17, 64), (132, 2**30)),
    )
)
FP8_GEMM = Table(
    Kernel(
        name="fp8_gemm",
        entry=f"{_MODULE}:fp8_gemm_kernel",
        signature={
            **_TENSORS,
            "part_ptr": "*fp32",
            "rows": "i32",
            "columns": "i32",
            "chunks": "i32",
            "scales": "i32",
            "block_rows": "i32",
            "block_columns": "i32",
            **_ADDED,
        },
        constants=("BLOCK_M", "BLOCK_N", "BLOCK_K", "SPLITS", "NATIVE"),
        divisible=frozenset(("x_ptr", "weight_ptr", "part_ptr")),
        chained=True,
    ),
    tuple(tiling.variant("fp8_gemm") for tiling in TILINGS),
)
FP8_ANY = Table(
    Kernel(
        name="fp8_any",
        entry=f"{_MODULE}:fp8_any_kernel",
        signature={
            **_TENSORS,
            "rows": "i32",
            "columns": "i32",
            "depth": "i32",
            "scales": "i32",
            "block_rows": "i32",
            "block_columns": "i32",
            **_ADDED,
        },
        constants=("BLOCK_M", "BLOCK_N", "BLOCK_K", "NATIVE"),
        chained=True,
    ),
    tuple(
        Variant(
            "fp8_any",
            f"rows16{suffix}",
            {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 32, "NATIVE": native},
            num_warps=4,
            num_stages=1,
            architectures=architectures,
        )
        for native, suffix, architectures in _DECODERS
    ),
)
FP8_UNPACK = Table(
    Kernel(
        name="fp8_unpack",
        entry=f"{_MODULE}:fp8_unpack_kernel",
        signature={
            "weight_ptr": "*u8",
            "scale_ptr": "*fp32",
            "out_ptr": "*T",
            "first": "i32",
            "chunks": "i32",
            "scales": "i32",
            "block_rows": "i32",
            "block_columns": "i32",
        },
        constants=("BLOCK", "NATIVE"),
        divisible=frozenset(("weight_ptr", "out_ptr")),
        chained=True,
    ),
    tuple(
        Variant(
            "fp8_unpack",
            f"chunks128{suffix}",
            {"BLOCK": 128, "NATIVE": native},
            num_warps=4,
            num_stages=1,
            architectures=architectures,
        )
        for native, suffix, architectures in _DECODERS
    ),
)
TABLES = (FP8_GEMV, FP8_GEMM, FP8_ANY, FP8_UNPACK)
GEMV_PLAN = LaunchPlan("fp8_gemv", (Step("fp8_gemv", ("ceil_div(columns, BLOCK_N)",)),))
GEMM_PLAN = LaunchPlan(
    "fp8_gemm",
    (Step("fp8_gemm", ("ceil_div(columns, BLOCK_N)", "SPLITS", "ceil_div(rows, BLOCK_M)")),),
    workspaces={"parts": "4 * SPLITS * rows * columns"},
)
ANY_PLAN = LaunchPlan("fp8_any", (Step("fp8_any", ("ceil_div(columns, BLOCK_N)", "ceil_div(rows, BLOCK_M)")),))
UNPACK_PLAN = LaunchPlan("fp8_unpack", (Step("fp8_unpack", ("part", "ceil_div(chunks, BLOCK)")),))
PLANS = (GEMV_PLAN, GEMM_PLAN, ANY_PLAN, UNPACK_PLAN)


def holds_tiles(depth: int, block: tuple[int, int]) -> bool:
    """Whether no tile of the kernels lies in two blocks, and the weight's rows are aligned."""
    rows, columns = block
    return depth % CHUNK == 0 and rows % TILE_ROWS == 0 and columns % TILE_COLUMNS == 0 and columns & (columns - 1) == 0


def fp8_block_gemm(
    x: Tensor,
    weight: Tensor,
    scale_inv: Tensor,
    *,
    block: tuple[int, int],
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    variant: Variant | None = None,
) -> Tensor:
    """x [M, K] w^T + bias [N] + residual [M, N]; all contiguous. Returns a new [M, N].

    weight float8_e4m3fn or its bytes [N, K]; scale_inv float32 [ceil(N / rows), ceil(K / columns)] for blocks of (rows,
    columns). `variant` forces a row.
    """
    depth, (block_rows, block_columns) = x.shape[1], block
    arguments: dict[str, Tensor | int | float] = {
        "weight_ptr": weight.view(torch.uint8),
        "scale_ptr": scale_inv,
        "chunks": depth // CHUNK,
        "scales": scale_inv.shape[1],
        "block_rows": block_rows,
        "block_columns": block_columns,
        "column_shift": (block_columns // 8).bit_length() - 1,
    }
    vectors: Arguments | None = {} if holds_tiles(depth, block) else None
    return _KERNELS.multiply(
        x, weight.shape[0], arguments, bias=bias, residual=residual, vectors=vectors, variant=variant
    )


_KERNELS = PackedKernels(
    gemv=(FP8_GEMV, GEMV_PLAN),
    gemm=(FP8_GEMM, GEMM_PLAN),
    any=(FP8_ANY, ANY_PLAN),
    unpack=(FP8_UNPACK, UNPACK_PLAN),
    unit="chunks",
)
