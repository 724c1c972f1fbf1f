# mypy: disable-error-code="no-untyped-def"
# Device functions have no types that mypy knows.
"""Products of some rows with weights of four bits, whose unpacked weights never leave the registers (sm_90).

They compute what `int4_gemm_triton.int4_gemm_kernel` and the kernels of `moe_int4_triton.py` do, for few rows. What the
plain language cannot say is where a thread's weights lie. Which of K's columns are multiplied together is free, so:

- a thread reads 16 bytes of a row, 32 columns of one group, and they are what it gives the tensor cores: of each of its
  four words the nibbles of one place are a part of one product, eight products in all;
- two words are unpacked at once, a place of both by one instruction, and the activations are loaded in that order.

The warps of a program share a tile of the weight's rows and split K: their sums are added in shared memory, in their
order, and no second launch is needed. Where 128 columns begin, a warp's next ones are asked for.
Written in Triton's lower-level language (`triton.experimental.gluon`), which has no interpreter: tested on a card only.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def _unpack(pair: str, power: str, one: str, minus_zero: str) -> gl.constexpr:
    """Of two words the nibbles of each place, as (q - zero) * scale of a pair of half floats, with one rounding.

    Operands: eight pairs out; the two words, a pair of scales, a pair of what `zero_points` gives. A nibble below the
    point of 2^7 (bfloat16) or 2^10 (float16) needs no conversion, and `power` holds that float twice.
    """
    lines = [
        "{",
        ".reg .b32 low, high, q, one, minus_zero;",
        f"mov.b32 one, {one};",
        f"mov.b32 minus_zero, {minus_zero};",
        "prmt.b32 low, $8, $9, 0x5410;",
        "prmt.b32 high, $8, $9, 0x7632;",
    ]
    for place in range(8):
        half = "low" if place < 4 else "high"
        lines += [
            f"shr.b32 q, {half}, {place % 4 * 4};",
            # (q & mask) | power.
            f"lop3.b32 q, q, 0x000f000f, {power}, 0xea;",
            f"fma.rn.{pair} q, q, one, $11;",
            f"fma.rn.{pair} ${place}, q, $10, minus_zero;",
        ]
    return gl.constexpr("\n".join([*lines, "}"]))


_BFLOAT16 = _unpack("bf16x2", "0x43004300", "0x3f803f80", "0x80008000")
_FLOAT16 = _unpack("f16x2", "0x64006400", "0x3c003c00", "0x80008000")
_OPERANDS = gl.constexpr(",".join(["=r"] * 8 + ["r"] * 4))


@gluon.constexpr_function
def _warps(parts, rank):
    """A warp a part of K, which is the first of `rank` dimensions."""
    return [[1 << bit] + [0] * (rank - 1) for bit in range(parts.bit_length() - 1)]


@gluon.constexpr_function
def _tiles(rows, rank):
    """A register each further 8 rows, which are the second of `rank` dimensions."""
    return [[0, 8 << bit] + [0] * (rank - 2) for bit in range((rows // 8).bit_length() - 1)]


@gluon.constexpr_function
def word_layout(rows, parts):
    """Words [parts, rows, 4 blocks, 4]: a thread has 16 bytes of each of its rows."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 0, 0, 2], *_tiles(rows, 4)],
        lane_bases=[[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        warp_bases=_warps(parts, 4),
        block_bases=[],
        shape=[parts, rows, 4, 4],
    )


@gluon.constexpr_function
def activation_layout(rows, parts):
    """Activations [parts, rows, 4 blocks, 4 words, 8]: a thread has the columns whose weights it has."""
    return gl.DistributedLinearLayout(
        reg_bases=[
            [0, 0, 0, 0, 1],
            [0, 0, 0, 0, 2],
            [0, 0, 0, 0, 4],
            [0, 0, 0, 1, 0],
            [0, 0, 0, 2, 0],
            *_tiles(rows, 5),
        ],
        lane_bases=[[0, 0, 1, 0, 0], [0, 0, 2, 0, 0], [0, 1, 0, 0, 0], [0, 2, 0, 0, 0], [0, 4, 0, 0, 0]],
        warp_bases=_warps(parts, 5),
        block_bases=[],
        shape=[parts, rows, 4, 4, 8],
    )


@gluon.constexpr_function
def sum_layout(parts):
    """Sums [parts, weight's rows, rows]: a warp a part."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[parts, 1, 1], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def _eight(dtype):
    return (dtype,) * 8


@gluon.constexpr_function
def _unpacking(dtype):
    return _BFLOAT16 if dtype == gl.bfloat16 else _FLOAT16


@gluon.constexpr_function
def _minus_power(dtype):
    """The bits of -2^7 or -2^10 as int16, below whose point a zero is written."""
    return (0xC300 if dtype == gl.bfloat16 else 0xE400) - 0x10000


@gluon.jit
def word_rows(BLOCK: gl.constexpr, PARTS: gl.constexpr):
    """The rows of a tile [PARTS, BLOCK, 4 blocks] of scales, which lie as `word_layout` has its words."""
    S: gl.constexpr = gl.SliceLayout(3, word_layout(BLOCK, PARTS))
    return gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(2, S)))[None, :, None]


@gluon.jit
def activation_rows(BLOCK: gl.constexpr, PARTS: gl.constexpr):
    """The rows of a tile [PARTS, BLOCK, 4 blocks, 4 words, 8] of activations."""
    X: gl.constexpr = activation_layout(BLOCK, PARTS)
    L: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, X))))
    return gl.arange(0, BLOCK, L)[None, :, None, None, None]


@gluon.jit
def weight_operand(w, LAYOUT: gl.constexpr):
    """One place of the words, [parts, rows, 4, 4], as a product takes it: [parts, rows, 16]. Nothing moves."""
    PARTS: gl.constexpr = w.shape[0]
    ROWS: gl.constexpr = w.shape[1]
    places = gl.permute(gl.reshape(w, [PARTS, ROWS, 4, 2, 2]), [0, 1, 3, 2, 4])
    return gl.convert_layout(gl.reshape(places, [PARTS, ROWS, 16]), LAYOUT, assert_trivial=True)


@gluon.jit
def activation_operand(x, LAYOUT: gl.constexpr):
    """The activations of one place, [parts, rows, 4, 4], as a product takes them: [parts, 16, rows]. Nothing moves."""
    PARTS: gl.constexpr = x.shape[0]
    ROWS: gl.constexpr = x.shape[1]
    places = gl.permute(gl.reshape(x, [PARTS, ROWS, 4, 2, 2]), [0, 3, 2, 4, 1])
    return gl.convert_layout(gl.reshape(places, [PARTS, 16, ROWS]), LAYOUT, assert_trivial=True)


@gluon.jit
def multiply(
    x_rows,
    real,
    weight_ptr,
    scales_ptr,
    zeros_ptr,
    row,
    blocks,
    groups,
    group_shift,
    zero_row,
    zero_step,
    PARTS: gl.constexpr,
    AHEAD: gl.constexpr,
    WAIT: gl.constexpr,
):
    """w x^T, float32 [rows of the weight, rows of x] in SliceLayout(0, sum_layout(PARTS)).

    x_rows: pointers to the rows, with `real` of them to be read, as `activation_rows` has them; row: the weight's rows,
    int64, as `word_rows` has them. AHEAD (1 or 2) is how many of a warp's steps are asked for ahead, and WAIT whether
    the weight is asked for before the launch ahead has ended.
    """
    BLOCK_N: gl.constexpr = row.shape[1]
    BLOCK_M: gl.constexpr = x_rows.shape[1]
    SUM: gl.constexpr = sum_layout(PARTS)
    A: gl.constexpr = gl.DotOperandLayout(0, SUM, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, SUM, 2)
    W: gl.constexpr = word_layout(BLOCK_N, PARTS)
    S: gl.constexpr = gl.SliceLayout(3, W)
    X: gl.constexpr = activation_layout(BLOCK_M, PARTS)
    XT: gl.constexpr = gl.SliceLayout(3, gl.SliceLayout(4, X))
    DTYPE: gl.constexpr = x_rows.dtype.element_ty
    MINUS_POWER: gl.constexpr = _minus_power(DTYPE)
    # Blocks of 32 columns of all parts' steps.
    STEP: gl.constexpr = PARTS * 4
    part = gl.arange(0, PARTS, gl.SliceLayout(1, gl.SliceLayout(2, S)))[:, None, None]
    own = part * 4 + gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, S)))[None, None, :]
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, W))))[None, None, None, :]
    w_rows = gl.expand_dims(weight_ptr + row * (blocks * 4), 3) + word
    s_rows = scales_ptr + row * groups
    z_rows = zeros_ptr + row * zero_row
    x_part = gl.arange(0, PARTS, gl.SliceLayout(1, gl.SliceLayout(2, XT)))[:, None, None]
    x_own = x_part * 4 + gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, XT)))[None, None, :]
    x_own = gl.expand_dims(gl.expand_dims(x_own, 3), 4)
    x_word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, X)))))
    x_place = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, X)))))
    x_rows += x_word[None, None, None, :, None] * 8 + x_place[None, None, None, None, :]
    # Blocks past the last read the last, and meet activations of zero.
    block = gl.minimum(own, blocks - 1)
    w = gl.load(w_rows + gl.expand_dims(block * 4, 3))
    s = gl.load(s_rows + (block >> group_shift))
    z = gl.load(z_rows + (block >> group_shift) * zero_step)
    if AHEAD > 1:
        block = gl.minimum(own + STEP, blocks - 1)
        w_1 = gl.load(w_rows + gl.expand_dims(block * 4, 3))
        s_1 = gl.load(s_rows + (block >> group_shift))
        z_1 = gl.load(z_rows + (block >> group_shift) * zero_step)
    if WAIT:
        gdc_wait()
    acc = gl.zeros([PARTS, BLOCK_N, BLOCK_M], gl.float32, SUM)
    x = gl.load(x_rows + x_own * 32, mask=real & (x_own < blocks), other=0.0)
    for start in range(0, blocks, STEP):
        x_next = x_own + (start + STEP)
        x_1 = gl.load(x_rows + x_next * 32, mask=real & (x_next < blocks), other=0.0)
        block = gl.minimum(own + (start + AHEAD * STEP), blocks - 1)
        w_2 = gl.load(w_rows + gl.expand_dims(block * 4, 3))
        s_2 = gl.load(s_rows + (block >> group_shift))
        z_2 = gl.load(z_rows + (block >> group_shift) * zero_step)
        minus_zero = (z.to(gl.int16) | MINUS_POWER).to(DTYPE, bitcast=True)
        q0, q1, q2, q3, q4, q5, q6, q7 = gl.inline_asm_elementwise(
            _unpacking(DTYPE),
            _OPERANDS,
            [w, gl.expand_dims(s, 3), gl.expand_dims(minus_zero, 3)],
            dtype=_eight(DTYPE),
            is_pure=True,
            pack=2,
        )
        even, odd = gl.split(gl.reshape(x, [PARTS, BLOCK_M, 4, 4, 2, 2, 2]))
        x04, x26 = gl.split(even)
        x15, x37 = gl.split(odd)
        x0, x4 = gl.split(x04)
        x2, x6 = gl.split(x26)
        x1, x5 = gl.split(x15)
        x3, x7 = gl.split(x37)
        acc = mma_v2(weight_operand(q0, A), activation_operand(x0, B), acc)
        acc = mma_v2(weight_operand(q1, A), activation_operand(x1, B), acc)
        acc = mma_v2(weight_operand(q2, A), activation_operand(x2, B), acc)
        acc = mma_v2(weight_operand(q3, A), activation_operand(x3, B), acc)
        acc = mma_v2(weight_operand(q4, A), activation_operand(x4, B), acc)
        acc = mma_v2(weight_operand(q5, A), activation_operand(x5, B), acc)
        acc = mma_v2(weight_operand(q6, A), activation_operand(x6, B), acc)
        acc = mma_v2(weight_operand(q7, A), activation_operand(x7, B), acc)
        x = x_1
        if AHEAD > 1:
            w, s, z = w_1, s_1, z_1
            w_1, s_1, z_1 = w_2, s_2, z_2
        else:
            w, s, z = w_2, s_2, z_2
    return gl.sum(acc, axis=0)


@gluon.jit
def int4_rows_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    rows,
    columns,
    blocks,
    groups,
    group_shift,
    zero_row,
    zero_step,
    with_bias,
    with_residual,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PARTS: gl.constexpr,
    AHEAD: gl.constexpr,
    CHAINED: gl.constexpr,
):
    if CHAINED:
        gdc_launch_dependents()
    first = gl.program_id(0) * BLOCK_N
    first_row = gl.program_id(1) * BLOCK_M
    x_row = first_row + activation_rows(BLOCK_M, PARTS)
    x_rows = x_ptr + x_row.to(gl.int64) * (blocks * 32)
    # Columns past the last are a real one's, and are not stored.
    row = gl.minimum(first + word_rows(BLOCK_N, PARTS), columns - 1).to(gl.int64)
    y = multiply(
        x_rows,
        x_row < rows,
        weight_ptr,
        scales_ptr,
        zeros_ptr,
        row,
        blocks,
        groups,
        group_shift,
        zero_row,
        zero_step,
        PARTS,
        AHEAD,
        CHAINED,
    )
    Y: gl.constexpr = gl.SliceLayout(0, sum_layout(PARTS))
    n = first + gl.arange(0, BLOCK_N, gl.SliceLayout(1, Y))
    m = first_row + gl.arange(0, BLOCK_M, gl.SliceLayout(0, Y))
    wanted = n < columns
    mask = wanted[:, None] & (m < rows)[None, :]
    target = m.to(gl.int64)[None, :] * columns + n[:, None]
    y += gl.load(bias_ptr + n, mask=wanted & (with_bias != 0), other=0.0).to(gl.float32)[:, None]
    y += gl.load(residual_ptr + target, mask=mask & (with_residual != 0), other=0.0).to(gl.float32)
    gl.store(out_ptr + target, y.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def moe_gate_up_int4_rows_kernel(
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
    group_shift,
    zero_row,
    zero_step,
    intermediate,
    top_k,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PARTS: gl.constexpr,
    AHEAD: gl.constexpr,
    CHAINED: gl.constexpr,
):
    """inner[place] = silu(gate) * up for every place of the sorted pairs; a program has BLOCK_N rows of both."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    columns = gl.cdiv(intermediate, BLOCK_N)
    tile = gl.program_id(0) // columns
    first = gl.program_id(0) % columns * BLOCK_N
    if tile < gl.load(tiles_ptr):
        first_place = tile * BLOCK_M
        expert = gl.load(tile_experts_ptr + tile).to(gl.int64)
        pair = gl.load(sorted_ptr + first_place + activation_rows(BLOCK_M, PARTS))
        x_rows = x_ptr + (gl.maximum(pair, 0) // top_k).to(gl.int64) * (blocks * 32)
        row = word_rows(2 * BLOCK_N, PARTS)
        # The tile's first half is of gates, the second of ups.
        place = gl.minimum(first + row % BLOCK_N, intermediate - 1)
        row = expert * (2 * intermediate) + place + gl.where(row >= BLOCK_N, intermediate, 0)
        both = multiply(
            x_rows,
            pair >= 0,
            weight_ptr,
            scales_ptr,
            zeros_ptr,
            row,
            blocks,
            groups,
            group_shift,
            zero_row,
            zero_step,
            PARTS,
            AHEAD,
            False,
        )
        Y: gl.constexpr = gl.SliceLayout(0, sum_layout(PARTS))
        gate, up = gl.split(gl.permute(gl.reshape(both, [2, BLOCK_N, BLOCK_M]), [1, 2, 0]))
        inner = gl.convert_layout(gate / (1.0 + gl.exp(-gate)) * up, Y)
        n = first + gl.arange(0, BLOCK_N, gl.SliceLayout(1, Y))
        m = first_place + gl.arange(0, BLOCK_M, gl.SliceLayout(0, Y))
        real = gl.load(sorted_ptr + m) >= 0
        target = m.to(gl.int64)[None, :] * intermediate + n[:, None]
        gl.store(
            inner_ptr + target, inner.to(inner_ptr.dtype.element_ty), mask=(n < intermediate)[:, None] & real[None, :]
        )


@gluon.jit
def moe_down_int4_rows_kernel(
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
    group_shift,
    zero_row,
    zero_step,
    hidden,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PARTS: gl.constexpr,
    AHEAD: gl.constexpr,
    CHAINED: gl.constexpr,
):
    """outputs[pair] = weights[pair] * (W_down inner[place])."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    columns = gl.cdiv(hidden, BLOCK_N)
    tile = gl.program_id(0) // columns
    first = gl.program_id(0) % columns * BLOCK_N
    if tile < gl.load(tiles_ptr):
        first_place = tile * BLOCK_M
        expert = gl.load(tile_experts_ptr + tile).to(gl.int64)
        place = first_place + activation_rows(BLOCK_M, PARTS)
        row = expert * hidden + gl.minimum(first + word_rows(BLOCK_N, PARTS), hidden - 1)
        y = multiply(
            inner_ptr + place.to(gl.int64) * (blocks * 32),
            gl.load(sorted_ptr + place) >= 0,
            weight_ptr,
            scales_ptr,
            zeros_ptr,
            row,
            blocks,
            groups,
            group_shift,
            zero_row,
            zero_step,
            PARTS,
            AHEAD,
            False,
        )
        Y: gl.constexpr = gl.SliceLayout(0, sum_layout(PARTS))
        n = first + gl.arange(0, BLOCK_N, gl.SliceLayout(1, Y))
        pair = gl.load(sorted_ptr + first_place + gl.arange(0, BLOCK_M, gl.SliceLayout(0, Y)))
        real = pair >= 0
        weight = gl.load(weights_ptr + pair, mask=real, other=0.0)
        target = pair.to(gl.int64)[None, :] * hidden + n[:, None]
        mask = (n < hidden)[:, None] & real[None, :]
        gl.store(outputs_ptr + target, (y * weight[None, :]).to(outputs_ptr.dtype.element_ty), mask=mask)
