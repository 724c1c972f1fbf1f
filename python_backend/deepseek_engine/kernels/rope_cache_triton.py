# mypy: disable-error-code="no-untyped-def"
# Device functions have no types that mypy knows.
"""Rotary embedding of the queries and the write of the latent into the paged cache, one pass over memory, on a GPU.

The references are `rope.rotate_pairs` and `rms_norm.rms_norm`. Each token t with position p and slot s:

    q_pe[t, h]                = rotate(q_pe[t, h], p)                            in place or into another tensor
    cache[s, : rank]          = weight * cast(c[t] / rms(c[t]))                  the latent's own norm
    cache[s, rank : rank + R] = rotate(k_pe[t], p)

rotate turns pairs (x[2i], x[2i + 1]) or, half-split, (x[i], x[i + R / 2]) by the angle p * inv_freq[i], computed in
float32 from a table of cosines and sines, which holds YaRN's factor (RoFormer, arXiv:2104.09864; YaRN,
arXiv:2309.00071). A slot below 0 marks a padded row, whose latent is written nowhere.

Memory-bound: 2 H R elements of queries, 2 (rank + R) of the latent and R float32 of the table a token.
"""

import triton
import triton.language as tl
from torch import Tensor

from deepseek_engine.kernels import launcher
from deepseek_engine.kernels.chaining import follow
from deepseek_engine.kernels.dispatch import require
from deepseek_engine.kernels.rms_norm_triton import normalise_rows
from deepseek_engine.kernels.variants import Kernel, LaunchPlan, Step, Table, Variant


@triton.jit
def normalise_heads(x, scale, weight):
    """weight * cast(x / rms(x)) of rows [N, D] held as float32, rounded as `rms_norm.rms_norm` does; scale is [N]."""
    rounded = (x * scale[:, None]).to(weight.dtype).to(tl.float32)
    return (rounded * weight.to(tl.float32)).to(weight.dtype).to(tl.float32)


@triton.jit
def rotate_rows(
    in_ptrs,
    out_ptrs,
    inside,
    cos,
    sin,
    half,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    weight_ptr=None,
    eps=0.0,
    NORM: tl.constexpr = False,
):
    """Rotate rows at in_ptrs [N, 1] into out_ptrs [N, 1]; inside [N, 1] masks rows, cos and sin are [1, HALF].

    NORM: each row is first normalised to its root mean square and multiplied by the weight [2 * half].
    """
    pair = tl.arange(0, HALF)[None, :]
    mask = inside & (pair < half)
    rows: tl.constexpr = in_ptrs.shape[0]
    if INTERLEAVED:
        column = tl.arange(0, 2 * HALF)[None, :]
        wide_mask = inside & (column < 2 * half)
        x = tl.load(in_ptrs + column, mask=wide_mask, other=0.0).to(tl.float32)
        if NORM:
            scale = tl.rsqrt(tl.sum(x * x, axis=1) / (2 * half) + eps)
            x = normalise_heads(x, scale, tl.load(weight_ptr + column, mask=column < 2 * half, other=0.0))
        a, b = tl.split(tl.reshape(x, (rows, HALF, 2)))
        turned = tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), (rows, 2 * HALF))
        tl.store(out_ptrs + column, turned.to(out_ptrs.dtype.element_ty), mask=wide_mask)
    else:
        a = tl.load(in_ptrs + pair, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(in_ptrs + half + pair, mask=mask, other=0.0).to(tl.float32)
        if NORM:
            scale = tl.rsqrt(tl.sum(a * a + b * b, axis=1) / (2 * half) + eps)
            a = normalise_heads(a, scale, tl.load(weight_ptr + pair, mask=pair < half, other=0.0))
            b = normalise_heads(b, scale, tl.load(weight_ptr + half + pair, mask=pair < half, other=0.0))
        tl.store(out_ptrs + pair, (a * cos - b * sin).to(out_ptrs.dtype.element_ty), mask=mask)
        tl.store(out_ptrs + half + pair, (a * sin + b * cos).to(out_ptrs.dtype.element_ty), mask=mask)


@triton.jit
def rope_cache_kernel(
    q_ptr,
    out_ptr,
    latent_ptr,
    weight_ptr,
    cache_ptr,
    table_ptr,
    positions_ptr,
    slots_ptr,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    latent_stride,
    cache_stride,
    heads,
    rank,
    half,
    eps,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    head_block = tl.program_id(1)
    position = tl.load(positions_ptr + token)
    pair = tl.arange(0, HALF)[None, :]
    cos = tl.load(table_ptr + position * (2 * half) + pair, mask=pair < half, other=0.0)
    sin = tl.load(table_ptr + position * (2 * half) + half + pair, mask=pair < half, other=0.0)
    if head_block > 0:
        head = ((head_block - 1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]).to(tl.int64)
        in_ptrs = q_ptr + token * q_token_stride + head * q_head_stride
        out_ptrs = out_ptr + token * out_token_stride + head * out_head_stride
        rotate_rows(in_ptrs, out_ptrs, head < heads, cos, sin, half, HALF, INTERLEAVED)
    else:
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            column = tl.arange(0, BLOCK_RANK)
            inside = column < rank
            c = tl.load(latent_ptr + token * latent_stride + column, mask=inside, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
            entry = cache_ptr + slot * cache_stride
            latent = normalise_rows(c, weight, inside, rank, eps)
            tl.store(entry + column, latent.to(cache_ptr.dtype.element_ty), mask=inside)
            row = tl.arange(0, 1)[:, None]
            k_pe = latent_ptr + token * latent_stride + rank + row
            rotate_rows(k_pe, entry + rank + row, row < 1, cos, sin, half, HALF, INTERLEAVED)


def _rows() -> tuple[Variant, ...]:
    rows = []
    for layout, interleaved in (("pairs", 1), ("halves", 0)):
        for half, rank in ((32, 512), (32, 1024), (64, 512)):
            # Small programs of one warp were the fastest of all on an H200, with 16 heads and with 128.
            rows.append(
                Variant(
                    "rope_cache",
                    f"{layout}_rope{2 * half}_rank{rank}",
                    {"BLOCK_HEADS": 16, "BLOCK_RANK": rank, "HALF": half, "INTERLEAVED": interleaved},
                    num_warps=1,
                    num_stages=1,
                    when={"interleaved": (interleaved, interleaved), "half": (1, half), "rank": (1, rank)},
                )
            )
    return tuple(rows)


_STRIDES = (
    "q_token_stride",
    "q_head_stride",
    "out_token_stride",
    "out_head_stride",
    "latent_stride",
    "cache_stride",
)
ROPE_CACHE = Table(
    Kernel(
        name="rope_cache",
        entry="deepseek_engine.kernels.rope_cache_triton:rope_cache_kernel",
        signature={
            "q_ptr": "*T",
            "out_ptr": "*T",
            "latent_ptr": "*T",
            "weight_ptr": "*T",
            "cache_ptr": "*T",
            "table_ptr": "*fp32",
            "positions_ptr": "*i64",
            "slots_ptr": "*i64",
            **dict.fromkeys(_STRIDES, "i32"),
            "heads": "i32",
            "rank": "i32",
            "half": "i32",
            "eps": "fp32",
        },
        constants=("BLOCK_HEADS", "BLOCK_RANK", "HALF", "INTERLEAVED"),
        divisible=frozenset(
            ("q_ptr", "out_ptr", "latent_ptr", "weight_ptr", "cache_ptr", "table_ptr", "rank", *_STRIDES)
        ),
        chained=True,
    ),
    _rows(),
)
TABLES = (ROPE_CACHE,)
PLANS = (LaunchPlan("rope_cache", (Step("rope_cache", ("tokens", "1 + ceil_div(heads, BLOCK_HEADS)")),)),)


def rope_cache(
    q_pe: Tensor,
    latent: Tensor,
    weight: Tensor,
    eps: float,
    table: Tensor,
    positions: Tensor,
    slots: Tensor,
    plane: Tensor,
    *,
    interleaved: bool = True,
    out: Tensor | None = None,
    variant: Variant | None = None,
) -> Tensor:
    """Rotate the queries and write the step's cache entries.

    q_pe [T, H, R], any token and head strides that are multiples of 16; latent [T, rank + R], what kv_a gives;
    weight [rank]; table as `rope_table` makes it; positions and slots int64 [T], a slot below 0 for a padded row;
    plane [slots, rank + R], one layer's. Returns `out` [T, H, R], by default q_pe itself, rotated in place.
    """
    out = q_pe if out is None else out
    tokens, heads, rotary = q_pe.shape
    rank = weight.shape[0]
    dims = {"tokens": tokens, "heads": heads, "half": rotary // 2, "rank": rank, "interleaved": int(interleaved)}
    row = variant or require(ROPE_CACHE, q_pe, dims)
    launcher.launch(
        ROPE_CACHE.kernel,
        row,
        PLANS[0].steps[0].blocks(dims, row),
        {
            "q_ptr": q_pe,
            "out_ptr": out,
            "latent_ptr": latent,
            "weight_ptr": weight,
            "cache_ptr": plane,
            "table_ptr": table,
            "positions_ptr": positions,
            "slots_ptr": slots,
            "q_token_stride": q_pe.stride(0),
            "q_head_stride": q_pe.stride(1),
            "out_token_stride": out.stride(0),
            "out_head_stride": out.stride(1),
            "latent_stride": latent.stride(0),
            "cache_stride": plane.stride(0),
            "heads": heads,
            "rank": rank,
            "half": rotary // 2,
            "eps": eps,
        },
    )
    return out
