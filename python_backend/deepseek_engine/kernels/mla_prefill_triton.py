# mypy: disable-error-code="no-untyped-def"
# Device functions have no types that mypy knows.
"""Expanded multi-head latent attention of prompts on a GPU; the reference is `mla_attention.py` (`_expanded`).

DeepSeek-V2 (arXiv:2405.04434, section 2.1.2). With kv[n, h] = [W_UK c_n | W_UV c_n] of the context's latents,

    s[t, n] = (q_nope[t] . k_nope[n] + q_pe[t] . k_pe[n]) * scale,    out[t] = sum_n softmax(s)[n] v[n]

a head. k_pe is one for all heads and is read as such, so keys are never put together in memory. Rows of any length
follow each other; a causal row's queries are the last of its keys. A context too long to expand at once is attended
to in chunks: the newest with the causal mask, the cached ones without, and `merge_attention` joins the results by
their log-sum-exps. Online softmax as in FlashAttention-2 (arXiv:2307.08691).

Operations: 2 heads queries keys (nope + rope + v), half of it where causal. Bound by arithmetic.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_engine.kernels import launcher
from deepseek_engine.kernels.dispatch import require
from deepseek_engine.kernels.variants import ADA, AMPERE, HOPPER, Kernel, LaunchPlan, Step, Table, Variant

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def attend(
    acc,
    peak,
    weight,
    q_nope,
    q_pe,
    kv_base,
    k_pe_base,
    begin,
    end,
    keys,
    last_key,
    kv_stride,
    k_pe_stride,
    nope,
    value_width,
    rotary,
    scale,
    NOPE: tl.constexpr,
    VALUE: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    WHOLE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Tiles begin .. end of the keys; MASKED ones may pass the last key or a query's own."""
    n = tl.arange(0, BLOCK_KEYS)
    d = tl.arange(0, NOPE)
    r = tl.arange(0, ROTARY)
    e = tl.arange(0, VALUE)
    for tile in tl.range(begin, end):
        key = tile * BLOCK_KEYS + n
        rows = kv_base + key.to(tl.int64) * kv_stride
        pe_rows = k_pe_base + key.to(tl.int64) * k_pe_stride
        if MASKED or not WHOLE:
            inside = key < keys
            d_inside = (d < nope) if not WHOLE else (d >= 0)
            r_inside = (r < rotary) if not WHOLE else (r >= 0)
            e_inside = (e < value_width) if not WHOLE else (e >= 0)
            k_nope = tl.load(rows[None, :] + d[:, None], mask=inside[None, :] & d_inside[:, None], other=0.0)
            k_pe = tl.load(pe_rows[None, :] + r[:, None], mask=inside[None, :] & r_inside[:, None], other=0.0)
            v = tl.load(rows[:, None] + nope + e[None, :], mask=inside[:, None] & e_inside[None, :], other=0.0)
        else:
            k_nope = tl.load(rows[None, :] + d[:, None])
            k_pe = tl.load(pe_rows[None, :] + r[:, None])
            v = tl.load(rows[:, None] + NOPE + e[None, :])
        s = tl.dot(q_nope, k_nope, input_precision="ieee")
        s = tl.dot(q_pe, k_pe, s, input_precision="ieee")
        if MASKED:
            s = tl.where(key[None, :] <= last_key[:, None], s, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(s, axis=1) * scale)
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
        p = tl.exp2(s * scale - shift[:, None])
        fade = tl.exp2(peak - shift)
        weight = weight * fade + tl.sum(p, axis=1)
        acc = acc * fade[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        peak = new_peak
    return acc, peak, weight


@triton.jit
def mla_prefill_kernel(
    q_ptr,
    kv_ptr,
    k_pe_ptr,
    out_ptr,
    lse_ptr,
    query_starts_ptr,
    key_starts_ptr,
    q_token_stride,
    q_head_stride,
    kv_token_stride,
    kv_head_stride,
    k_pe_stride,
    heads,
    nope,
    value_width,
    rotary,
    scale,
    NOPE: tl.constexpr,
    VALUE: tl.constexpr,
    ROTARY: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    # The last queries see the most keys: they start first, so that the card does not wait for one of them at the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2)
    query_start = tl.load(query_starts_ptr + row)
    queries = tl.load(query_starts_ptr + row + 1) - query_start
    key_start = tl.load(key_starts_ptr + row)
    keys = tl.load(key_starts_ptr + row + 1) - key_start
    if block * BLOCK_QUERIES < queries:
        lane = tl.arange(0, BLOCK_QUERIES)
        query = block * BLOCK_QUERIES + lane
        d = tl.arange(0, NOPE)
        r = tl.arange(0, ROTARY)
        e = tl.arange(0, VALUE)
        valid = query < queries
        # One 64-bit base a block: offsets within it fit 32 bits, and half the registers.
        first_token = query_start.to(tl.int64) + block * BLOCK_QUERIES
        q_rows = q_ptr + first_token * q_token_stride + head.to(tl.int64) * q_head_stride + lane * q_token_stride
        d_inside = d < (NOPE if WHOLE else nope)
        r_inside = r < (ROTARY if WHOLE else rotary)
        e_inside = e < (VALUE if WHOLE else value_width)
        q_nope = tl.load(q_rows[:, None] + d[None, :], mask=valid[:, None] & d_inside[None, :], other=0.0)
        q_pe = tl.load(q_rows[:, None] + nope + r[None, :], mask=valid[:, None] & r_inside[None, :], other=0.0)
        kv_base = kv_ptr + key_start.to(tl.int64) * kv_token_stride + head.to(tl.int64) * kv_head_stride
        k_pe_base = k_pe_ptr + key_start.to(tl.int64) * k_pe_stride
        acc = tl.zeros((BLOCK_QUERIES, VALUE), dtype=tl.float32)
        peak = tl.full((BLOCK_QUERIES,), float("-inf"), dtype=tl.float32)
        weight = tl.zeros((BLOCK_QUERIES,), dtype=tl.float32)
        if CAUSAL:
            last_key = keys - queries + query
            first_last = keys - queries + block * BLOCK_QUERIES
            whole_tiles = tl.minimum(tl.maximum(first_last + 1, 0), keys) // BLOCK_KEYS
            seen = tl.maximum(tl.minimum(first_last + BLOCK_QUERIES, keys), 0)
        else:
            last_key = tl.zeros((BLOCK_QUERIES,), dtype=tl.int32) + keys - 1
            whole_tiles = keys // BLOCK_KEYS
            seen = keys
        log_scale = scale * LOG2_E
        acc, peak, weight = attend(
            acc,
            peak,
            weight,
            q_nope,
            q_pe,
            kv_base,
            k_pe_base,
            0,
            whole_tiles,
            keys,
            last_key,
            kv_token_stride,
            k_pe_stride,
            nope,
            value_width,
            rotary,
            log_scale,
            NOPE,
            VALUE,
            ROTARY,
            BLOCK_KEYS,
            WHOLE,
            False,
        )
        acc, peak, weight = attend(
            acc,
            peak,
            weight,
            q_nope,
            q_pe,
            kv_base,
            k_pe_base,
            whole_tiles,
            tl.cdiv(seen, BLOCK_KEYS),
            keys,
            last_key,
            kv_token_stride,
            k_pe_stride,
            nope,
            value_width,
            rotary,
            log_scale,
            NOPE,
            VALUE,
            ROTARY,
            BLOCK_KEYS,
            WHOLE,
            True,
        )
        empty = weight == 0.0
        whole = tl.where(empty, 1.0, weight)
        lse = tl.where(empty, float("-inf"), (peak + tl.log2(whole)) * LN_2)
        first_row = first_token * heads + head
        tl.store(lse_ptr + first_row + lane * heads, lse, mask=valid)
        out_base = out_ptr + first_row * value_width
        width = VALUE if WHOLE else value_width
        tl.store(
            out_base + (lane * heads * width)[:, None] + e[None, :],
            (acc * (1.0 / whole)[:, None]).to(out_ptr.dtype.element_ty),
            mask=valid[:, None] & e_inside[None, :],
        )


@triton.jit
def merge_attention_kernel(
    out_ptr, lse_ptr, other_ptr, other_lse_ptr, rows, width, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """out, lse = the attention over both key sets. A set with lse -inf, or NaN rows beside it, weighs nothing."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    valid = row < rows
    inside = valid[:, None] & (column < width)[None, :]
    a = tl.load(lse_ptr + row, mask=valid, other=float("-inf"))
    b = tl.load(other_lse_ptr + row, mask=valid, other=float("-inf"))
    # One library writes +inf for an empty set, another -inf: neither is a weight.
    a = tl.where(a == float("inf"), float("-inf"), a)
    b = tl.where(b == float("inf"), float("-inf"), b)
    peak = tl.maximum(a, b)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    weight_a, weight_b = tl.exp(a - shift), tl.exp(b - shift)
    total = weight_a + weight_b
    empty = total == 0.0
    whole = tl.where(empty, 1.0, total)
    place = (row * width)[:, None] + column[None, :]
    out_a = tl.load(out_ptr + place, mask=inside & (weight_a > 0.0)[:, None], other=0.0).to(tl.float32)
    out_b = tl.load(other_ptr + place, mask=inside & (weight_b > 0.0)[:, None], other=0.0).to(tl.float32)
    merged = out_a * (weight_a / whole)[:, None] + out_b * (weight_b / whole)[:, None]
    tl.store(out_ptr + place, merged.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(lse_ptr + row, tl.where(empty, float("-inf"), shift + tl.log(whole)), mask=valid)


_MODULE = "deepseek_engine.kernels.mla_prefill_triton"
_CONSTANTS = ("NOPE", "VALUE", "ROTARY", "WHOLE", "BLOCK_QUERIES", "BLOCK_KEYS", "CAUSAL")
_STRIDES = ("q_token_stride", "q_head_stride", "kv_token_stride", "kv_head_stride", "k_pe_stride")


def variant(
    name: str,
    widths: tuple[int, int, int],
    queries: int,
    keys: int,
    warps: int,
    stages: int,
    architectures: tuple[int, ...],
    causal: bool,
    stack_bytes: int = 0,
) -> Variant:
    """A row for (nope, v, rope) `widths`: DeepSeek's own exactly, smaller ones padded to powers of two."""
    nope, value, rotary = widths
    whole = widths == (128, 128, 64)
    low = {"nope": nope, "value": value, "rotary": rotary} if whole else {"nope": 1, "value": 1, "rotary": 1}
    return Variant(
        "mla_prefill",
        f"{name}_{'causal' if causal else 'full'}",
        {
            "NOPE": nope,
            "VALUE": value,
            "ROTARY": rotary,
            "WHOLE": int(whole),
            "BLOCK_QUERIES": queries,
            "BLOCK_KEYS": keys,
            "CAUSAL": int(causal),
        },
        num_warps=warps,
        num_stages=stages,
        architectures=architectures,
        when={
            "nope": (low["nope"], nope),
            "value": (low["value"], value),
            "rotary": (low["rotary"], rotary),
            "causal": (int(causal), int(causal)),
        },
        stack_bytes=stack_bytes,
        wide_tiles=queries >= 64,
    )


MLA_PREFILL = Table(
    Kernel(
        name="mla_prefill",
        entry=f"{_MODULE}:mla_prefill_kernel",
        signature={
            "q_ptr": "*T",
            "kv_ptr": "*T",
            "k_pe_ptr": "*T",
            "out_ptr": "*T",
            "lse_ptr": "*fp32",
            "query_starts_ptr": "*i32",
            "key_starts_ptr": "*i32",
            **dict.fromkeys(_STRIDES, "i32"),
            "heads": "i32",
            "nope": "i32",
            "value_width": "i32",
            "rotary": "i32",
            "scale": "fp32",
        },
        constants=_CONSTANTS,
        divisible=frozenset(("q_ptr", "kv_ptr", "k_pe_ptr", "out_ptr", *_STRIDES, "nope", "rotary")),
    ),
    tuple(
        variant(name, widths, queries, keys, warps, stages, architectures, causal)
        for causal in (True, False)
        for name, widths, queries, keys, warps, stages, architectures in (
            ("sm90", (128, 128, 64), 128, 64, 8, 3, (HOPPER,)),
            ("sm80", (128, 128, 64), 64, 64, 8, 3, (AMPERE,)),
            ("sm89", (128, 128, 64), 64, 64, 8, 2, (ADA,)),
            ("narrow", (64, 64, 64), 64, 32, 4, 2, (AMPERE, ADA, HOPPER)),
        )
    ),
)
MERGE_ATTENTION = Table(
    Kernel(
        name="merge_attention",
        entry=f"{_MODULE}:merge_attention_kernel",
        signature={
            "out_ptr": "*T",
            "lse_ptr": "*fp32",
            "other_ptr": "*T",
            "other_lse_ptr": "*fp32",
            "rows": "i32",
            "width": "i32",
        },
        constants=("BLOCK", "ROWS"),
        divisible=frozenset(("out_ptr", "other_ptr")),
    ),
    (
        Variant("merge_attention", "width128", {"BLOCK": 128, "ROWS": 16}, 4, 1, when={"width": (1, 128)}),
        Variant("merge_attention", "width512", {"BLOCK": 512, "ROWS": 4}, 4, 1, when={"width": (129, 512)}),
    ),
)
TABLES = (MLA_PREFILL, MERGE_ATTENTION)
PLAN = LaunchPlan("mla_prefill", (Step("mla_prefill", ("ceil_div(longest, BLOCK_QUERIES)", "heads", "sequences")),))
MERGE_PLAN = LaunchPlan("merge_attention", (Step("merge_attention", ("ceil_div(rows, ROWS)",)),))
PLANS = (PLAN, MERGE_PLAN)


def mla_prefill(
    q: Tensor,
    kv: Tensor,
    k_pe: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    *,
    longest: int,
    value_width: int,
    scale: float,
    causal: bool,
    row: Variant | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend a row's queries to its keys.

    q [T, H, nope + rope], rotated; kv [L, H, nope + v], k_nope first; k_pe [L, rope], rotated, any row stride;
    query_starts and key_starts int32 [R + 1] on the device: row r owns q[query_starts[r] : query_starts[r + 1]] and the
    keys likewise, and where causal its queries are the last of its keys. `longest`: the most queries of a row, on the
    host. Returns out [T, H, v] and the log-sum-exp float32 [T, H], -inf (and 0 out) where a query sees no key.
    """
    tokens, heads, width = q.shape
    rotary = k_pe.shape[-1]
    nope = width - rotary
    out = torch.empty(tokens, heads, value_width, dtype=q.dtype, device=q.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    dims = {
        "nope": nope,
        "value": value_width,
        "rotary": rotary,
        "causal": int(causal),
        "longest": longest,
        "heads": heads,
        "sequences": query_starts.shape[0] - 1,
    }
    chosen = row or require(MLA_PREFILL, q, dims)
    launcher.launch(
        MLA_PREFILL.kernel,
        chosen,
        PLAN.steps[0].blocks(dims, chosen),
        {
            "q_ptr": q,
            "kv_ptr": kv,
            "k_pe_ptr": k_pe,
            "out_ptr": out,
            "lse_ptr": lse,
            "query_starts_ptr": query_starts,
            "key_starts_ptr": key_starts,
            "q_token_stride": q.stride(0),
            "q_head_stride": q.stride(1),
            "kv_token_stride": kv.stride(0),
            "kv_head_stride": kv.stride(1),
            "k_pe_stride": k_pe.stride(0),
            "heads": heads,
            "nope": nope,
            "value_width": value_width,
            "rotary": rotary,
            "scale": scale,
        },
    )
    return out, lse


def merge_attention(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Join attention over two key sets into `out` [T, H, v] and `lse` [T, H], contiguous; either set may be empty."""
    dims = {"rows": lse.numel(), "width": out.shape[-1]}
    row = require(MERGE_ATTENTION, out, dims)
    launcher.launch(
        MERGE_ATTENTION.kernel,
        row,
        MERGE_PLAN.steps[0].blocks(dims, row),
        {
            "out_ptr": out,
            "lse_ptr": lse,
            "other_ptr": other,
            "other_lse_ptr": other_lse,
            "rows": dims["rows"],
            "width": dims["width"],
        },
    )
