# mypy: disable-error-code="no-untyped-def"
# Device functions have no types that mypy knows.
"""Rotary embedding of rows of heads on a GPU, by itself; the references are `rope.rotations` and `rope.rotate_pairs_`.

    out[t, h, kept :] = rotate(x[t, h, kept :], positions[t] * inv_freq),    the first `kept` columns of a head pass

rotate turns pairs (x[2i], x[2i + 1]) or, half-split, (x[i], x[i + half]), by angles in float32 (RoFormer,
arXiv:2104.09864). The models' own steps rotate where they write the cache (`rope_cache_triton.py`).

Memory-bound: 2 elements a column of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_engine.kernels import launcher
from deepseek_engine.kernels.chaining import follow
from deepseek_engine.kernels.dispatch import require
from deepseek_engine.kernels.rope_cache_triton import rotate_rows
from deepseek_engine.kernels.variants import Kernel, LaunchPlan, Step, Table, Variant


@triton.jit
def cosine_and_sine(angle):
    """Of a float32 angle, within 2^-22 of the exact values.

    The compiler's own functions reduce large angles with a table in local memory, which makes the binary several times
    as large. The polynomials are those of the Cephes library (Moshier, sinf.c), for a quarter turn about 0.
    """
    exact = angle.to(tl.float64)
    quarters = tl.floor(exact * 0.6366197723675814 + 0.5)
    r = (exact - quarters * 1.5707963267948966).to(tl.float32)
    z = r * r
    sine = r + r * z * (-1.6666654611e-1 + z * (8.3321608736e-3 - z * 1.9515295891e-4))
    cosine = 1.0 - 0.5 * z + z * z * (4.166664568298827e-2 + z * (-1.388731625493765e-3 + z * 2.443315711809948e-5))
    quadrant = quarters.to(tl.int64) & 3
    odd = (quadrant & 1) == 1
    turned_cosine = tl.where(odd, sine, cosine)
    turned_sine = tl.where(odd, cosine, sine)
    cosine = tl.where((quadrant == 1) | (quadrant == 2), -turned_cosine, turned_cosine)
    sine = tl.where(quadrant >= 2, -turned_sine, turned_sine)
    return cosine, sine


@triton.jit
def rotary_kernel(
    x_ptr,
    positions_ptr,
    inv_freq_ptr,
    out_ptr,
    heads,
    width,
    half,
    scale,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KEPT: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)).to(tl.int64)[:, None]
    inside = head < heads
    kept = width - 2 * half
    place = (token * heads + head) * width
    pair = tl.arange(0, HALF)[None, :]
    frequency = tl.load(inv_freq_ptr + pair, mask=pair < half, other=0.0)
    # Rounded to float32 here, as the reference has it.
    angle = tl.load(positions_ptr + token).to(tl.float32) * frequency
    cos, sin = cosine_and_sine(angle)
    cos = cos * scale
    sin = sin * scale
    rotate_rows(x_ptr + place + kept, out_ptr + place + kept, inside, cos, sin, half, HALF, INTERLEAVED)
    for start in tl.range(0, kept, BLOCK_KEPT):
        column = start + tl.arange(0, BLOCK_KEPT)[None, :]
        mask = inside & (column < kept)
        tl.store(out_ptr + place + column, tl.load(x_ptr + place + column, mask=mask), mask=mask)


ROTARY = Table(
    Kernel(
        name="rotary",
        entry="deepseek_engine.kernels.rotary_triton:rotary_kernel",
        signature={
            "x_ptr": "*T",
            "positions_ptr": "*i64",
            "inv_freq_ptr": "*fp32",
            "out_ptr": "*T",
            "heads": "i32",
            "width": "i32",
            "half": "i32",
            "scale": "fp32",
        },
        constants=("BLOCK_HEADS", "BLOCK_KEPT", "HALF", "INTERLEAVED"),
        divisible=frozenset(("x_ptr", "out_ptr")),
        chained=True,
    ),
    tuple(
        Variant(
            "rotary",
            f"half{half}_{'pairs' if interleaved else 'halves'}",
            {"BLOCK_HEADS": heads, "BLOCK_KEPT": 128, "HALF": half, "INTERLEAVED": interleaved},
            num_warps=4,
            num_stages=1,
            when={"half": (low, half), "interleaved": (interleaved, interleaved)},
        )
        for low, half, heads in ((1, 64, 4), (65, 256, 1))
        for interleaved in (1, 0)
    ),
)
TABLES = (ROTARY,)
PLANS = (LaunchPlan("rotary", (Step("rotary", ("rows", "ceil_div(heads, BLOCK_HEADS)")),)),)


def rotary(x: Tensor, positions: Tensor, inv_freq: Tensor, *, scale: float, interleaved: bool) -> Tensor:
    """Turn the last 2 F columns of every head; returns a new tensor.

    x [T, heads, width], contiguous; positions int64 [T]; inv_freq float32 [F], 2 F <= width; `scale` multiplies cosine
    and sine.
    """
    dims = {
        "rows": x.shape[0],
        "heads": x.shape[1],
        "half": inv_freq.shape[0],
        "interleaved": int(interleaved),
    }
    out = torch.empty_like(x)
    row = require(ROTARY, x, dims)
    launcher.launch(
        ROTARY.kernel,
        row,
        PLANS[0].steps[0].blocks(dims, row),
        {
            "x_ptr": x,
            "positions_ptr": positions,
            "inv_freq_ptr": inv_freq,
            "out_ptr": out,
            "heads": dims["heads"],
            "width": x.shape[2],
            "half": dims["half"],
            "scale": scale,
        },
    )
    return out
