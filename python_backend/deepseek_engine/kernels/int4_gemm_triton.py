# mypy: disable-error-code="no-untyped-def"
# Device functions have no types that mypy knows.
"""Products with weights of four bits on a GPU; the reference is `int4_gemm.py`.

    out = x w^T + bias + residual,    w[n, k] = (q[n, k] - zeros[n, g]) * scales[n, g],    g = k // group_size

q is two columns a byte, the even one in the low half. One or two rows are matrix-vector products: a thread unpacks 32
columns of some rows of the weight into float32. Some more run on the tensor cores: a tile of the weight is unpacked
into the rows' own type, with one rounding, and is the wide side. Where the tiles are too few for the card, K is split,
and `sum_parts` adds the parts in their order. For many rows the weight is unpacked into scratch memory, part by part,
and the library multiplies. All these take whole blocks of 32 columns that lie in one group; a kernel of its own takes
any depth and group, group by group, and is several times slower.

On sm_90 up to 32 rows take `int4_rows_gluon.py` in place of the first two, which is up to twice as fast.

Bound by memory for few rows: each byte of the weight is read once.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_engine.kernels.chaining import follow
from deepseek_engine.kernels.packed_product import PackedKernels, Tiling
from deepseek_engine.kernels.split_sum_triton import store_row
from deepseek_engine.kernels.variants import HOPPER, Kernel, LaunchPlan, Step, Table, Variant

BLOCK_COLUMNS = 32
"""Columns that are unpacked together."""
BLOCKED_GROUPS = (32, 64, 128)
"""Group sizes of the kernels for whole blocks."""


@triton.jit
def small_integers(q, like_ptr):
    """Integers of 0 to 127 in the type that a pointer is to, by their bits: the ones below the point of 2^p hold q."""
    if like_ptr.dtype.element_ty == tl.bfloat16:
        made = (q.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - 128.0
    elif like_ptr.dtype.element_ty == tl.float16:
        made = (q.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1024.0
    else:
        made = q.to(tl.float32)
    return made


@triton.jit
def unpack_tile(w, s, z, like_ptr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """A tile [BLOCK_N, BLOCK_K] of the weight in the type that a pointer is to.

    w uint8 [BLOCK_N, BLOCK_K / 2]; s and z [BLOCK_N, BLOCK_K / 32] of its blocks.
    """
    q = tl.reshape(tl.join(w & 15, w >> 4), (BLOCK_N, BLOCK_K // 32, 32))
    f = (small_integers(q, like_ptr) - small_integers(z, like_ptr)[:, :, None]) * s[:, :, None]
    return tl.reshape(f, (BLOCK_N, BLOCK_K))


@triton.jit
def nibbles(w, low, high, low_power, high_power, SHIFT: tl.constexpr):
    """2^11 + q0 and 2^7 + q1, float32, for the two nibbles that a shift by SHIFT brings to bit 12.

    A nibble below the leading bit of a float32's mantissa needs no conversion, and what it is more than q is taken off
    the sum: `sum_begin`.
    """
    v = w << SHIFT if SHIFT >= 0 else w >> -SHIFT
    return ((v & low) | low_power).to(tl.float32, bitcast=True), ((v & high) | high_power).to(tl.float32, bitcast=True)


@triton.jit
def sum_begin(x0, x1, x2, x3, x4, x5, x6, x7, z):
    """What a sum over the nibbles of a word begins with: minus the powers of `nibbles`, minus the zero."""
    evens = x0 + x2 + x4 + x6
    odds = x1 + x3 + x5 + x7
    return -(evens * 2048.0 + odds * 128.0) - z * (evens + odds)


@triton.jit
def load_words(x_ptr, block, mask, BLOCK: tl.constexpr):
    """The eight columns of every word of blocks of a row, each float32 [BLOCK, 4, 1]."""
    x = tl.load(x_ptr + block[:, None] * 32 + tl.arange(0, 32)[None, :], mask=mask[:, None], other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, (BLOCK, 4, 4, 2)))
    e02, e13 = tl.split(tl.reshape(even, (BLOCK, 4, 2, 2)))
    o02, o13 = tl.split(tl.reshape(odd, (BLOCK, 4, 2, 2)))
    x0, x4 = tl.split(e02)
    x2, x6 = tl.split(e13)
    x1, x5 = tl.split(o02)
    x3, x7 = tl.split(o13)
    return (
        x0[:, :, None],
        x1[:, :, None],
        x2[:, :, None],
        x3[:, :, None],
        x4[:, :, None],
        x5[:, :, None],
        x6[:, :, None],
        x7[:, :, None],
    )


@triton.jit
def int4_gemv_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    columns,
    blocks,
    groups,
    group_shift,
    zero_row,
    zero_step,
    with_bias,
    with_residual,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK)
    wanted = n < columns
    near = tl.where(wanted, n, 0).to(tl.int64)[None, :]
    w_rows = weight_ptr + (near * (blocks * 4))[None, :, :] + tl.arange(0, 4)[None, :, None]
    s_rows = scales_ptr + near * groups
    z_rows = zeros_ptr + near * zero_row
    depth = blocks * 32
    # Masks that the compiler does not know stay in registers, where one instruction takes two of them.
    one = tl.num_programs(1)
    low = one * 0xF000
    high = one * 0xF0000
    low_power = one * 0x45000000
    high_power = one * 0x43000000
    # A block of the weight is asked for ahead of its product, the first while the kernel before still runs.
    block = tl.minimum(lane, blocks - 1)
    w = tl.load(w_rows + (block * 4)[:, None, None])
    group = (block >> group_shift)[:, None]
    s = tl.load(s_rows + group)
    z = tl.load(z_rows + group * zero_step)
    follow(CHAINED)
    acc = tl.zeros((BLOCK, BLOCK_N), dtype=tl.float32)
    acc_1 = tl.zeros((BLOCK, BLOCK_N), dtype=tl.float32)
    for start in tl.range(0, blocks, BLOCK):
        block = start + lane
        inside = block < blocks
        zero = z.to(tl.float32)[:, None, :]
        scale = s.to(tl.float32)
        x0, x1, x2, x3, x4, x5, x6, x7 = load_words(x_ptr, block, inside, BLOCK)
        dot = sum_begin(x0, x1, x2, x3, x4, x5, x6, x7, zero)
        if ROWS == 2:
            y0, y1, y2, y3, y4, y5, y6, y7 = load_words(x_ptr + depth, block, inside, BLOCK)
            dot_1 = sum_begin(y0, y1, y2, y3, y4, y5, y6, y7, zero)
        even, odd = nibbles(w, low, high, low_power, high_power, 12)
        dot += even * x0
        dot += odd * x1
        if ROWS == 2:
            dot_1 += even * y0
            dot_1 += odd * y1
        even, odd = nibbles(w, low, high, low_power, high_power, 4)
        dot += even * x2
        dot += odd * x3
        if ROWS == 2:
            dot_1 += even * y2
            dot_1 += odd * y3
        even, odd = nibbles(w, low, high, low_power, high_power, -4)
        dot += even * x4
        dot += odd * x5
        if ROWS == 2:
            dot_1 += even * y4
            dot_1 += odd * y5
        even, odd = nibbles(w, low, high, low_power, high_power, -12)
        dot += even * x6
        dot += odd * x7
        if ROWS == 2:
            dot_1 += even * y6
            dot_1 += odd * y7
        acc += scale * tl.sum(dot, axis=1)
        if ROWS == 2:
            acc_1 += scale * tl.sum(dot_1, axis=1)
        block = tl.minimum(block + BLOCK, blocks - 1)
        w = tl.load(w_rows + (block * 4)[:, None, None])
        group = (block >> group_shift)[:, None]
        s = tl.load(s_rows + group)
        z = tl.load(z_rows + group * zero_step)
    store_row(tl.sum(acc, axis=0), bias_ptr, residual_ptr, out_ptr, n, wanted, with_bias, with_residual)
    if ROWS == 2:
        second = tl.sum(acc_1, axis=0)
        store_row(second, bias_ptr, residual_ptr + columns, out_ptr + columns, n, wanted, with_bias, with_residual)


@triton.jit
def int4_gemm_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    part_ptr,
    rows,
    columns,
    blocks,
    groups,
    group_size,
    zero_row,
    zero_step,
    with_bias,
    with_residual,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    depth = blocks * 32
    follow(CHAINED)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    h = tl.arange(0, BLOCK_K // 2)
    part = tl.arange(0, BLOCK_K // 32) * 32
    wanted = n < columns
    real = m < rows
    near = tl.where(wanted, n, 0).to(tl.int64)[:, None]
    x_rows = x_ptr + m.to(tl.int64)[None, :] * depth
    w_rows = weight_ptr + near * (blocks * 16)
    s_rows = scales_ptr + near * groups
    z_rows = zeros_ptr + near * zero_row
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    steps = tl.cdiv(tl.cdiv(depth, BLOCK_K), SPLITS)
    first = split * steps
    last = tl.minimum(first + steps, tl.cdiv(depth, BLOCK_K))
    group = ((first * BLOCK_K) // group_size + part // group_size)[None, :]
    s = tl.load(s_rows + group, mask=group < groups, other=0.0)
    z = tl.load(z_rows + group * zero_step, mask=group < groups, other=0)
    for step in tl.range(first, last):
        column = step * BLOCK_K + k
        half = step * (BLOCK_K // 2) + h
        x = tl.load(x_rows + column[:, None], mask=(column < depth)[:, None] & real[None, :], other=0.0)
        w = tl.load(w_rows + half[None, :], mask=(half < blocks * 16)[None, :], other=0)
        acc = tl.dot(unpack_tile(w, s, z, x_ptr, BLOCK_N, BLOCK_K), x, acc, input_precision="ieee")
        group = (((step + 1) * BLOCK_K) // group_size + part // group_size)[None, :]
        s = tl.load(s_rows + group, mask=group < groups, other=0.0)
        z = tl.load(z_rows + group * zero_step, mask=group < groups, other=0)
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
def int4_unpack_kernel(
    weight_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,
    first,
    blocks,
    groups,
    group_size,
    zero_row,
    zero_step,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """BLOCK blocks of a row of the weight from `first` on, as the half type has them."""
    follow(CHAINED)
    place = tl.program_id(0).to(tl.int64)
    row = first + place
    block = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (block < blocks)[:, None]
    byte = tl.arange(0, 16)[None, :]
    w = tl.load(weight_ptr + row * (blocks * 16) + block[:, None] * 16 + byte, mask=inside, other=0)
    group = block * 32 // group_size
    s = tl.load(scales_ptr + row * groups + group, mask=block < blocks, other=0.0)[:, None]
    z = tl.load(zeros_ptr + row * zero_row + group * zero_step, mask=block < blocks, other=0)[:, None]
    q = tl.reshape(tl.join(w & 15, w >> 4), (BLOCK, 32))
    f = (small_integers(q, out_ptr) - small_integers(z, out_ptr)) * s
    target = out_ptr + place * (blocks * 32) + block[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(target, f, mask=inside)


@triton.jit
def int4_any_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    rows,
    columns,
    depth,
    groups,
    group_size,
    zero_row,
    zero_step,
    with_bias,
    with_residual,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
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
    w_rows = weight_ptr + near[:, None] * ((depth + 1) // 2)
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    pieces = tl.cdiv(group_size, BLOCK_K)
    for step in tl.range(0, groups * pieces):
        group = step // pieces
        column = group * group_size + (step % pieces) * BLOCK_K + k
        inside = column < tl.minimum(depth, (group + 1) * group_size)
        x = tl.load(x_rows + column[:, None], mask=inside[:, None] & real[None, :], other=0.0)
        w = tl.load(w_rows + (column // 2)[None, :], mask=inside[None, :], other=0)
        s = tl.load(scales_ptr + near * groups + group)
        z = tl.load(zeros_ptr + near * zero_row + group * zero_step)
        q = (w >> ((column % 2) * 4)[None, :].to(tl.uint8)) & 15
        f = (small_integers(q, x_ptr) - small_integers(z, x_ptr)[:, None]) * s[:, None]
        acc = tl.dot(f, x, acc, input_precision="ieee")
    mask = wanted[:, None] & real[None, :]
    target = m.to(tl.int64)[None, :] * columns + n[:, None]
    acc += tl.load(bias_ptr + n, mask=wanted & (with_bias != 0), other=0.0).to(tl.float32)[:, None]
    acc += tl.load(residual_ptr + target, mask=mask & (with_residual != 0), other=0.0).to(tl.float32)
    tl.store(out_ptr + target, acc.to(out_ptr.dtype.element_ty), mask=mask)


def gemv_variant(
    name: str, columns: int, blocks: int, warps: int, rows: int = 1, reach: tuple[int, int] = (1, 2**30)
) -> Variant:
    """`columns` rows of the weight a program, `blocks` blocks of 32 columns of it at a time.

    Two rows take a few words of local memory; of the tiles that were timed these are the fastest all the same.
    """
    return Variant(
        "int4_gemv",
        name,
        {"ROWS": rows, "BLOCK_N": columns, "BLOCK": blocks},
        num_warps=warps,
        num_stages=1,
        stack_bytes=32 * (rows - 1),
        when={"rows": (rows, rows), "columns": reach},
    )


def in_registers(kernel: str, tile: tuple[int, int, int, int], **when: tuple[int, int]) -> Variant:
    """A row of a kernel of `int4_rows_gluon.py`: rows, rows of the weight, parts of K and steps ahead."""
    rows, columns, parts, ahead = tile
    name = "".join(f"{letter}{size}" for letter, size in zip("mnpa", tile, strict=True))
    if "blocks" in when:
        name += f"_blocks{when['blocks'][0]}"
    return Variant(
        kernel,
        name,
        {"BLOCK_M": rows, "BLOCK_N": columns, "PARTS": parts, "AHEAD": ahead},
        num_warps=parts,
        num_stages=1,
        architectures=(HOPPER,),
        when=when,
    )


_MODULE = "deepseek_engine.kernels.int4_gemm_triton"
_TENSORS = {
    "x_ptr": "*T",
    "weight_ptr": "*u8",
    "scales_ptr": "*T",
    "zeros_ptr": "*u8",
    "bias_ptr": "*T",
    "residual_ptr": "*T",
    "out_ptr": "*T",
}
_ZEROS = {"zero_row": "i32", "zero_step": "i32"}
_ADDED = {"with_bias": "i32", "with_residual": "i32"}
INT4_GEMV = Table(
    Kernel(
        name="int4_gemv",
        entry=f"{_MODULE}:int4_gemv_kernel",
        signature={
            **_TENSORS,
            # Words of eight columns.
            "weight_ptr": "*i32",
            "columns": "i32",
            "blocks": "i32",
            "groups": "i32",
            "group_shift": "i32",
            **_ZEROS,
            **_ADDED,
        },
        constants=("ROWS", "BLOCK_N", "BLOCK"),
        divisible=frozenset(("x_ptr", "weight_ptr")),
        chained=True,
    ),
    (
        # Few programs are made wide, so that they still fill the card.
        gemv_variant("few_columns", 4, 128, 4, reach=(1, 3071)),
        gemv_variant("columns", 4, 64, 2, reach=(3072, 16383)),
        gemv_variant("many_columns", 8, 64, 2, reach=(16384, 2**30)),
        gemv_variant("two_rows", 8, 64, 2, rows=2),
    ),
)
TILINGS = (
    Tiling("rows16_split8", 16, 128, 128, 8, 8, 4, (1, 16), (1, 159)),
    Tiling("rows16_split2", 16, 128, 128, 2, 4, 3, (1, 16), (160, 2**30)),
    Tiling("rows64_split4", 64, 128, 64, 4, 8, 3, (17, 64), (1, 159)),
    Tiling("rows64", 64, 64, 128, 1, 4, 3, (17, 64), (160, 2**30)),
)
INT4_GEMM = Table(
    Kernel(
        name="int4_gemm",
        entry=f"{_MODULE}:int4_gemm_kernel",
        signature={
            **_TENSORS,
            "part_ptr": "*fp32",
            "rows": "i32",
            "columns": "i32",
            "blocks": "i32",
            "groups": "i32",
            "group_size": "i32",
            **_ZEROS,
            **_ADDED,
        },
        constants=("BLOCK_M", "BLOCK_N", "BLOCK_K", "SPLITS"),
        divisible=frozenset(("x_ptr", "weight_ptr", "part_ptr")),
        chained=True,
    ),
    tuple(tiling.variant("int4_gemm") for tiling in TILINGS),
)
INT4_ANY = Table(
    Kernel(
        name="int4_any",
        entry=f"{_MODULE}:int4_any_kernel",
        signature={
            **_TENSORS,
            "rows": "i32",
            "columns": "i32",
            "depth": "i32",
            "groups": "i32",
            "group_size": "i32",
            **_ZEROS,
            **_ADDED,
        },
        constants=("BLOCK_M", "BLOCK_N", "BLOCK_K"),
        chained=True,
    ),
    (Variant("int4_any", "rows16", {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 32}, num_warps=4, num_stages=1),),
)
INT4_UNPACK = Table(
    Kernel(
        name="int4_unpack",
        entry=f"{_MODULE}:int4_unpack_kernel",
        signature={
            "weight_ptr": "*u8",
            "scales_ptr": "*T",
            "zeros_ptr": "*u8",
            "out_ptr": "*T",
            "first": "i32",
            "blocks": "i32",
            "groups": "i32",
            "group_size": "i32",
            **_ZEROS,
        },
        constants=("BLOCK",),
        divisible=frozenset(("weight_ptr", "out_ptr")),
        chained=True,
    ),
    (Variant("int4_unpack", "blocks128", {"BLOCK": 128}, num_warps=4, num_stages=1),),
)
ROWS_MODULE = "deepseek_engine.kernels.int4_rows_gluon"
ROWS_CONSTANTS = ("BLOCK_M", "BLOCK_N", "PARTS", "AHEAD")
INT4_ROWS = Table(
    Kernel(
        name="int4_rows",
        entry=f"{ROWS_MODULE}:int4_rows_kernel",
        signature={
            **_TENSORS,
            # Words of eight columns.
            "weight_ptr": "*i32",
            "rows": "i32",
            "columns": "i32",
            "blocks": "i32",
            "groups": "i32",
            "group_shift": "i32",
            **_ZEROS,
            **_ADDED,
        },
        constants=ROWS_CONSTANTS,
        divisible=frozenset(("x_ptr", "weight_ptr")),
        chained=True,
    ),
    tuple(
        in_registers("int4_rows", tile, rows=rows, columns=columns, **more)
        for rows, columns, tile, more in (
            # Few columns are split the most; each range is what was the fastest of the tiles that were timed.
            ((1, 8), (1, 3071), (8, 16, 16, 1), {}),
            ((1, 8), (3072, 6143), (8, 16, 8, 2), {}),
            ((1, 8), (6144, 16383), (8, 32, 8, 1), {}),
            ((1, 8), (16384, 2**30), (8, 32, 4, 1), {}),
            ((9, 16), (1, 3071), (16, 16, 16, 2), {}),
            ((9, 16), (3072, 6143), (16, 32, 8, 1), {}),
            ((9, 16), (6144, 16383), (16, 32, 4, 1), {"blocks": (1, 127)}),
            ((9, 16), (6144, 16383), (16, 64, 8, 1), {"blocks": (128, 2**30)}),
            ((9, 16), (16384, 2**30), (16, 32, 4, 1), {}),
            ((17, 32), (1, 3071), (16, 32, 8, 2), {}),
            ((17, 32), (3072, 6143), (16, 64, 8, 1), {}),
            ((17, 32), (6144, 2**30), (16, 64, 4, 1), {}),
        )
    ),
)
"""Up to 32 rows on sm_90, in place of INT4_GEMV and INT4_GEMM."""
TABLES = (INT4_GEMV, INT4_GEMM, INT4_ROWS, INT4_ANY, INT4_UNPACK)
GEMV_PLAN = LaunchPlan("int4_gemv", (Step("int4_gemv", ("ceil_div(columns, BLOCK_N)",)),))
GEMM_PLAN = LaunchPlan(
    "int4_gemm",
    (Step("int4_gemm", ("ceil_div(columns, BLOCK_N)", "SPLITS", "ceil_div(rows, BLOCK_M)")),),
    workspaces={"parts": "4 * SPLITS * rows * columns"},
)
ROWS_PLAN = LaunchPlan("int4_rows", (Step("int4_rows", ("ceil_div(columns, BLOCK_N)", "ceil_div(rows, BLOCK_M)")),))
ANY_PLAN = LaunchPlan("int4_any", (Step("int4_any", ("ceil_div(columns, BLOCK_N)", "ceil_div(rows, BLOCK_M)")),))
UNPACK_PLAN = LaunchPlan("int4_unpack", (Step("int4_unpack", ("part", "ceil_div(blocks, BLOCK)")),))
PLANS = (GEMV_PLAN, GEMM_PLAN, ROWS_PLAN, ANY_PLAN, UNPACK_PLAN)


@lru_cache(maxsize=8)
def eights(device: torch.device) -> Tensor:
    """uint8 [1]: the zero of every group of a weight without zeros."""
    return torch.full((1,), 8, dtype=torch.uint8, device=device)


def group_shift(group_size: int) -> int:
    """Of blocks of 32 columns to their groups."""
    return (group_size // BLOCK_COLUMNS).bit_length() - 1


def is_blocked(depth: int, group_size: int) -> bool:
    """Whether the weight is whole blocks of 32 columns, each of one group."""
    return depth % BLOCK_COLUMNS == 0 and group_size in BLOCKED_GROUPS


def int4_gemm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    group_size: int,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    variant: Variant | None = None,
) -> Tensor:
    """x [M, K] w^T + bias [N] + residual [M, N]; all contiguous. Returns a new [M, N].

    weight uint8 [N, ceil(K / 2)]; scales [N, ceil(K / group_size)] in x's dtype; zeros uint8 as scales, 8 if absent;
    group_size a multiple of 8. `variant` forces a row.
    """
    depth, groups = x.shape[1], scales.shape[1]
    arguments: dict[str, Tensor | int | float] = {
        "weight_ptr": weight,
        "scales_ptr": scales,
        "zeros_ptr": eights(x.device) if zeros is None else zeros,
        "blocks": depth // BLOCK_COLUMNS,
        "groups": groups,
        "group_size": group_size,
        "group_shift": group_shift(group_size),
        "zero_row": 0 if zeros is None else groups,
        "zero_step": 0 if zeros is None else 1,
    }
    vectors = {"weight_ptr": weight.view(torch.int32)} if is_blocked(depth, group_size) else None
    return _KERNELS.multiply(
        x, weight.shape[0], arguments, bias=bias, residual=residual, vectors=vectors, variant=variant
    )


_KERNELS = PackedKernels(
    gemv=(INT4_GEMV, GEMV_PLAN),
    gemm=(INT4_GEMM, GEMM_PLAN),
    any=(INT4_ANY, ANY_PLAN),
    unpack=(INT4_UNPACK, UNPACK_PLAN),
    unit="blocks",
    rows=(INT4_ROWS, ROWS_PLAN),
)
