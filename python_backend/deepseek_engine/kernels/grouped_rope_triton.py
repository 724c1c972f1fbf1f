# mypy: disable-error-code="no-untyped-def"
# Device functions have no types that mypy knows.
"""Rotary embedding of queries and keys and the write of keys and values into the paged cache, one pass over memory.

For grouped-query attention on a GPU; the references are `rope.rotate_pairs_` and `rms_norm.rms_norm`. Each token t with
position p and slot s, for every query head h and key head k:

    q[t, h]                  = rotate(norm(q[t, h]), p)                          in place
    keys[s, k * d : ...]     = rotate(norm(k[t, k]), p)
    values[s, k * d : ...]   = v[t, k]

norm is the identity, or Qwen3's RMSNorm of each head (arXiv:2505.09388, section 2), rounded to the dtype before and
after its weight. rotate turns pairs (x[2i], x[2i + 1]) or, half-split, (x[i], x[i + d / 2]) by the angle
p * inv_freq[i], in float32, from `rope.rope_table` (RoFormer, arXiv:2104.09864). A slot below 0 marks a
padded row, whose key and value are written nowhere.

Memory-bound: 2 H d elements of queries, 4 K d of keys and values and d float32 of the table a token.
"""

import triton
import triton.language as tl
from torch import Tensor

from deepseek_engine.kernels import launcher
from deepseek_engine.kernels.chaining import follow
from deepseek_engine.kernels.dispatch import require
from deepseek_engine.kernels.rope_cache_triton import rotate_rows
from deepseek_engine.kernels.variants import Kernel, LaunchPlan, Step, Table, Variant


@triton.jit
def grouped_rope_cache_kernel(
    q_ptr,
    out_ptr,
    k_ptr,
    v_ptr,
    q_weight_ptr,
    k_weight_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    positions_ptr,
    slots_ptr,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    keys_stride,
    values_stride,
    heads,
    key_heads,
    half,
    eps,
    BLOCK_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    query_blocks = tl.cdiv(heads, BLOCK_HEADS)
    position = tl.load(positions_ptr + token)
    lane = tl.arange(0, BLOCK_HEADS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    cos = tl.load(table_ptr + position * (2 * half) + pair, mask=pair < half, other=0.0)
    sin = tl.load(table_ptr + position * (2 * half) + half + pair, mask=pair < half, other=0.0)
    if block < query_blocks:
        head = block * BLOCK_HEADS + lane
        rows = q_ptr + token * q_token_stride + head * q_head_stride
        out_rows = out_ptr + token * out_token_stride + head * out_head_stride
        rotate_rows(rows, out_rows, head < heads, cos, sin, half, HALF, INTERLEAVED, q_weight_ptr, eps, NORM)
    else:
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            head = (block - query_blocks) * BLOCK_HEADS + lane
            inside = head < key_heads
            rows = k_ptr + token * k_token_stride + head * k_head_stride
            entries = keys_ptr + slot * keys_stride + head * (2 * half)
            rotate_rows(rows, entries, inside, cos, sin, half, HALF, INTERLEAVED, k_weight_ptr, eps, NORM)
            column = tl.arange(0, 2 * HALF)[None, :]
            mask = inside & (column < 2 * half)
            v = tl.load(v_ptr + token * v_token_stride + head * v_head_stride + column, mask=mask, other=0.0)
            tl.store(values_ptr + slot * values_stride + head * (2 * half) + column, v, mask=mask)


_ANY, _MANY = (1, 2**20), (17, 2**20)


def variant(
    name: str,
    block_heads: int,
    half: int,
    warps: int,
    *,
    interleaved: bool,
    norm: bool,
    key_heads: tuple[int, int] = _ANY,
) -> Variant:
    """A row for heads of up to 2 * `half` elements, half a power of two."""
    layout, normed = int(interleaved), int(norm)
    return Variant(
        "grouped_rope_cache",
        name,
        {"BLOCK_HEADS": block_heads, "HALF": half, "INTERLEAVED": layout, "NORM": normed},
        num_warps=warps,
        num_stages=1,
        when={
            "interleaved": (layout, layout),
            "norm": (normed, normed),
            "half": (1, half),
            "key_heads": key_heads,
        },
    )


_STRIDES = (
    "q_token_stride",
    "q_head_stride",
    "out_token_stride",
    "out_head_stride",
    "k_token_stride",
    "k_head_stride",
    "v_token_stride",
    "v_head_stride",
    "keys_stride",
    "values_stride",
)
_POINTERS = ("q_ptr", "out_ptr", "k_ptr", "v_ptr", "q_weight_ptr", "k_weight_ptr", "keys_ptr", "values_ptr")
GROUPED_ROPE_CACHE = Table(
    Kernel(
        name="grouped_rope_cache",
        entry="deepseek_engine.kernels.grouped_rope_triton:grouped_rope_cache_kernel",
        signature={
            **dict.fromkeys(_POINTERS, "*T"),
            "table_ptr": "*fp32",
            "positions_ptr": "*i64",
            "slots_ptr": "*i64",
            **dict.fromkeys(_STRIDES, "i32"),
            "heads": "i32",
            "key_heads": "i32",
            "half": "i32",
            "eps": "fp32",
        },
        constants=("BLOCK_HEADS", "HALF", "INTERLEAVED", "NORM"),
        divisible=frozenset((*_POINTERS, *_STRIDES, "table_ptr", "half")),
        chained=True,
    ),
    tuple(
        variant(
            f"{'pairs' if interleaved else 'halves'}_{name}{'_norm' if norm else ''}",
            16,
            half,
            warps,
            interleaved=interleaved,
            norm=norm,
            key_heads=key_heads,
        )
        for interleaved in (True, False)
        for norm in (False, True)
        # Of eight on an H200 the fastest with 8 and with 32 key heads.
        for name, half, warps, key_heads in (
            ("width64", 32, 1, _ANY),
            ("width128_heads", 64, 4, _MANY),
            ("width128", 64, 2, _ANY),
        )
    ),
)
TABLES = (GROUPED_ROPE_CACHE,)
PLAN = LaunchPlan(
    "grouped_rope_cache",
    (Step("grouped_rope_cache", ("tokens", "ceil_div(heads, BLOCK_HEADS) + ceil_div(key_heads, BLOCK_HEADS)")),),
)
PLANS = (PLAN,)


def grouped_rope_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    interleaved: bool = True,
    row: Variant | None = None,
) -> None:
    """Normalise and rotate the queries in place, and write the step's keys and values.

    q [T, H, d], k and v [T, K, d], d a multiple of 16, of any token and head strides that are multiples of 16 bytes, so
    slices of one projection will do; k and v are only read. table as `rope_table` makes it; positions and slots int64
    [T], a slot below 0 for a padded row; keys and values [slots, K * d], one layer's planes. norms: the weights [d] of
    the queries' and the keys' RMSNorm, in the order of the columns.

    Raises:
        NoVariantError: no row for the width.
    """
    tokens, heads, width = q.shape
    key_heads = k.shape[1]
    dims = {
        "tokens": tokens,
        "heads": heads,
        "key_heads": key_heads,
        "half": width // 2,
        "interleaved": int(interleaved),
        "norm": int(norms is not None),
    }
    chosen = row or require(GROUPED_ROPE_CACHE, q, dims)
    # Without norms nothing is read through the weights' pointers.
    q_weight, k_weight = norms or (q, k)
    launcher.launch(
        GROUPED_ROPE_CACHE.kernel,
        chosen,
        PLAN.steps[0].blocks(dims, chosen),
        {
            "q_ptr": q,
            "out_ptr": q,
            "k_ptr": k,
            "v_ptr": v,
            "q_weight_ptr": q_weight,
            "k_weight_ptr": k_weight,
            "keys_ptr": keys,
            "values_ptr": values,
            "table_ptr": table,
            "positions_ptr": positions,
            "slots_ptr": slots,
            "q_token_stride": q.stride(0),
            "q_head_stride": q.stride(1),
            "out_token_stride": q.stride(0),
            "out_head_stride": q.stride(1),
            "k_token_stride": k.stride(0),
            "k_head_stride": k.stride(1),
            "v_token_stride": v.stride(0),
            "v_head_stride": v.stride(1),
            "keys_stride": keys.stride(0),
            "values_stride": values.stride(0),
            "heads": heads,
            "key_heads": key_heads,
            "half": width // 2,
            "eps": eps,
        },
    )
