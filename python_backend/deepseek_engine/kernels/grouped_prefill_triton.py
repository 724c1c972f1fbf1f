# mypy: disable-error-code="no-untyped-def"
# Device functions have no types that mypy knows.
"""Prompts of grouped-query attention, straight from the paged cache, on a GPU; the reference is `paged_attention.py`.

GQA (arXiv:2305.13245); K = H is multi-head attention. A row of Q new tokens over L cached ones, its own included, whose
query head h reads key head k = h // (H / K):

    s[t, h, n] = q[t, h] . key[n, k] * scale                    n <= L - Q + t
    out[t, h]  = sum_n softmax(s)[n] value[n, k]                [d]
    lse[t, h]  = ln sum_n exp s[t, h, n]                        float32, -inf where nothing is visible

The new keys and values are in the cache already, so a prefix that was computed before costs nothing but its reading.
The query heads of one key head, token by token, are the rows of one product: a tile of keys is read once for all of
them, and a block of rows spans few tokens, of which little is masked away. Online softmax as in FlashAttention-2
(arXiv:2307.08691).

Operations: 4 H d a visible pair of tokens. Bound by arithmetic.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_engine.kernels import launcher
from deepseek_engine.kernels.dispatch import require
from deepseek_engine.kernels.grouped_decode_triton import LN_2, LOG2_E, attend_cached, group_size, own_rows
from deepseek_engine.kernels.variants import ADA, AMPERE, HOPPER, Kernel, LaunchPlan, Step, Table, Variant


@triton.jit
def grouped_prefill_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    table_rows_ptr,
    lengths_ptr,
    query_starts_ptr,
    out_ptr,
    lse_ptr,
    q_token_stride,
    q_head_stride,
    keys_stride,
    values_stride,
    table_stride,
    key_heads,
    group,
    width,
    scale,
    WIDTH: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
):
    # The last queries see the most keys: they start first, so that the card does not wait for one of them at the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    key_head = tl.program_id(1)
    sequence = tl.program_id(2)
    query_start = tl.load(query_starts_ptr + sequence)
    queries = tl.load(query_starts_ptr + sequence + 1) - query_start
    if block * BLOCK_ROWS < queries * group:
        length = tl.load(lengths_ptr + sequence)
        d = tl.arange(0, WIDTH)
        lane = tl.arange(0, BLOCK_ROWS)
        d_inside = d < (WIDTH if WHOLE else width)
        # Rows past the last stand in for it and are not stored.
        last = queries * group - 1
        valid = block * BLOCK_ROWS + lane <= last
        row = tl.minimum(block * BLOCK_ROWS + lane, last)
        # One 64-bit base a block: offsets within it fit 32 bits, and half the registers.
        first_query = block * BLOCK_ROWS // group
        first_token = query_start.to(tl.int64) + first_query
        query = row // group - first_query
        head = key_head * group + row % group
        q = tl.load(
            q_ptr
            + first_token * q_token_stride
            + (query * q_token_stride + head * q_head_stride)[:, None]
            + d[None, :],
            mask=d_inside[None, :],
            other=0.0,
        )
        head_offset = key_head * (WIDTH if WHOLE else width)
        table_row = table_ptr + tl.load(table_rows_ptr + sequence).to(tl.int64) * table_stride
        first_visible = length - queries + first_query + 1
        visible = first_visible + query
        whole_tiles = tl.minimum(tl.maximum(first_visible, 0), length) // TILE
        last_visible = length - queries + tl.minimum(block * BLOCK_ROWS + BLOCK_ROWS - 1, last) // group + 1
        seen = tl.maximum(tl.minimum(last_visible, length), 0)
        acc, peak, weight = attend_cached(
            tl.zeros((BLOCK_ROWS, WIDTH), dtype=tl.float32),
            tl.full((BLOCK_ROWS,), float("-inf"), dtype=tl.float32),
            tl.zeros((BLOCK_ROWS,), dtype=tl.float32),
            q,
            keys_ptr + head_offset,
            values_ptr + head_offset,
            table_row,
            0,
            whole_tiles,
            length,
            visible,
            keys_stride,
            values_stride,
            width,
            scale * LOG2_E,
            WIDTH,
            WHOLE,
            TILE,
            PAGE,
            False,
        )
        acc, peak, weight = attend_cached(
            acc,
            peak,
            weight,
            q,
            keys_ptr + head_offset,
            values_ptr + head_offset,
            table_row,
            whole_tiles,
            tl.cdiv(seen, TILE),
            length,
            visible,
            keys_stride,
            values_stride,
            width,
            scale * LOG2_E,
            WIDTH,
            WHOLE,
            TILE,
            PAGE,
            True,
        )
        empty = weight == 0.0
        total = tl.where(empty, 1.0, weight)
        heads = key_heads * group
        place = query * heads + head
        tl.store(
            lse_ptr + first_token * heads + place,
            tl.where(empty, float("-inf"), (peak + tl.log2(total)) * LN_2),
            mask=valid,
        )
        tl.store(
            out_ptr + first_token * heads * width + (place * (WIDTH if WHOLE else width))[:, None] + d[None, :],
            (acc * (1.0 / total)[:, None]).to(out_ptr.dtype.element_ty),
            mask=valid[:, None] & d_inside[None, :],
        )


PAGES = (64, 32, 16)
"""Tokens a block of the table."""


def variant(
    name: str,
    width: int,
    rows: int,
    tile: int,
    warps: int,
    stages: int,
    architectures: tuple[int, ...],
    page: int,
    *,
    whole: bool = True,
    stack_bytes: int = 0,
) -> Variant:
    """A row for heads `width` wide, a power of two, exactly or padded to it."""
    return Variant(
        "grouped_prefill",
        f"{name}_page{page}",
        {"WIDTH": width, "WHOLE": int(whole), "BLOCK_ROWS": rows, "TILE": tile, "PAGE": page},
        num_warps=warps,
        num_stages=stages,
        architectures=architectures,
        when={"page": (page, page), "width": (width if whole else 1, width)},
        stack_bytes=stack_bytes,
        wide_tiles=rows >= 64,
    )


_STRIDES = ("q_token_stride", "q_head_stride", "keys_stride", "values_stride")
GROUPED_PREFILL = Table(
    Kernel(
        name="grouped_prefill",
        entry="deepseek_engine.kernels.grouped_prefill_triton:grouped_prefill_kernel",
        signature={
            "q_ptr": "*T",
            "keys_ptr": "*T",
            "values_ptr": "*T",
            "table_ptr": "*i32",
            "table_rows_ptr": "*i32",
            "lengths_ptr": "*i32",
            "query_starts_ptr": "*i32",
            "out_ptr": "*T",
            "lse_ptr": "*fp32",
            **dict.fromkeys(_STRIDES, "i32"),
            "table_stride": "i32",
            "key_heads": "i32",
            "group": "i32",
            "width": "i32",
            "scale": "fp32",
        },
        constants=("WIDTH", "WHOLE", "BLOCK_ROWS", "TILE", "PAGE"),
        divisible=frozenset(("q_ptr", "keys_ptr", "values_ptr", "out_ptr", *_STRIDES, "width")),
    ),
    tuple(
        variant(name, width, rows, tile, warps, stages, architectures, page, whole=whole)
        for name, width, rows, tile, warps, stages, architectures, whole in (
            ("width128_sm90", 128, 64, 64, 4, 3, (HOPPER,), True),
            ("width128_sm80", 128, 64, 64, 4, 3, (AMPERE,), True),
            ("width128_sm89", 128, 64, 64, 4, 2, (ADA,), True),
            ("width64_sm90", 64, 128, 64, 4, 3, (HOPPER,), True),
            ("width64", 64, 64, 64, 4, 3, (AMPERE, ADA), True),
            ("padded128", 128, 64, 32, 4, 2, (AMPERE, ADA, HOPPER), False),
        )
        for page in PAGES
    ),
)
TABLES = (GROUPED_PREFILL,)
PLAN = LaunchPlan(
    "grouped_prefill",
    (Step("grouped_prefill", ("ceil_div(longest * group, BLOCK_ROWS)", "key_heads", "sequences")),),
)
PLANS = (PLAN,)


def grouped_prefill(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    tables: Tensor,
    *,
    page: int,
    longest: int,
    scale: float,
    table_rows: Tensor | None = None,
    out: Tensor | None = None,
    row: Variant | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend each row's new tokens to the cache, which already holds them.

    q [T, H, d], rotated, of any token and head strides that are multiples of 16 bytes, so a slice of a projection will
    do; keys and values [slots, K * d], one layer's planes; scale above 0. On the device: query_starts int32 [R + 1],
    row r owns q[query_starts[r] : query_starts[r + 1]]; lengths int32 [R], tokens in the cache, the row's new ones
    last; tables int32 [rows, blocks] of blocks of `page` tokens; table_rows int32 [R], the row of `tables` that each
    row uses, by default its own. `longest`: the most new tokens of a row, on the host; a captured launch serves fewer
    too. Returns `out` [T, H, d], contiguous, by default a new one of q's dtype, and the log-sum-exp float32 [T, H],
    -inf (and 0 out) where a query sees no key.

    Raises:
        ValueError: heads that do not divide.
        NoVariantError: no row for the page size or the width.
    """
    tokens, heads, width = q.shape
    sequences = lengths.shape[0]
    key_heads = keys.shape[1] // width
    group = group_size(heads, key_heads)
    out = torch.empty(tokens, heads, width, dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    dims = {
        "longest": longest,
        "group": group,
        "key_heads": key_heads,
        "sequences": sequences,
        "page": page,
        "width": width,
    }
    chosen = row or require(GROUPED_PREFILL, q, dims)
    launcher.launch(
        GROUPED_PREFILL.kernel,
        chosen,
        PLAN.steps[0].blocks(dims, chosen),
        {
            "q_ptr": q,
            "keys_ptr": keys,
            "values_ptr": values,
            "table_ptr": tables,
            "table_rows_ptr": own_rows(sequences, q.device) if table_rows is None else table_rows,
            "lengths_ptr": lengths,
            "query_starts_ptr": query_starts,
            "out_ptr": out,
            "lse_ptr": lse,
            "q_token_stride": q.stride(0),
            "q_head_stride": q.stride(1),
            "keys_stride": keys.stride(0),
            "values_stride": values.stride(0),
            "table_stride": tables.stride(0),
            "key_heads": key_heads,
            "group": group,
            "width": width,
            "scale": scale,
        },
    )
    return out, lse
