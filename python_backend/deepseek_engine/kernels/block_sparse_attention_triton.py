# mypy: disable-error-code="no-untyped-def"
# Device functions have no types that mypy knows.
"""Block-sparse attention on a GPU; the reference is `block_sparse_attention.py`, the map of blocks `block_map.py`.

    s[t, n] = q[t] . k[n] * scale where query t sees key n, else -inf,    out[t] = sum_n softmax(s[t])[n] v[n]

a batch and head. What a mask leaves of a tile of BLOCK_QUERIES x BLOCK_KEYS is known before the launch: absent tiles
are not visited, full ones run a loop without a mask, and partial ones a loop that masks the scores in registers by a
bit an element. Both loops follow a list of key blocks whose entries, and the bits, are loaded a step ahead: no load
of keys waits for its address. The query blocks with the most tiles start first, so that the card does not wait for
one of them at the end. Online softmax as in FlashAttention-2 (arXiv:2307.08691); skipping absent blocks as in
FlashAttention (arXiv:2205.14135, section 3.3).

A key may have a second part, as DeepSeek's rotated one (arXiv:2405.04434, section 2.1.2), which heads may share.

Operations: 2 heads (width + v) elements of the tiles that are present. Bound by arithmetic.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_engine.kernels import launcher
from deepseek_engine.kernels.block_lists import SCHEDULE_WIDTH
from deepseek_engine.kernels.block_map import BlockMap
from deepseek_engine.kernels.dispatch import NoVariantError, require
from deepseek_engine.kernels.variants import (
    ADA,
    AMPERE,
    HOPPER,
    Kernel,
    LaunchPlan,
    Step,
    Table,
    Variant,
    nearest_architecture,
)

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
WORK = tl.constexpr(SCHEDULE_WIDTH)


@triton.jit
def visible_words(bits_ptr, slot, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """The bits of a partial block: int32 [BLOCK_QUERIES] for its keys 0 .. 31 and for 32 .. 63."""
    WORDS: tl.constexpr = BLOCK_KEYS // 32
    rows = bits_ptr + slot.to(tl.int64) * (BLOCK_QUERIES * WORDS) + tl.arange(0, BLOCK_QUERIES) * WORDS
    low = tl.load(rows)
    high = tl.load(rows + 1) if WORDS == 2 else low
    return low, high


@triton.jit
def attend_listed(
    acc,
    peak,
    weight,
    q,
    q_pe,
    k_base,
    k_pe_base,
    v_base,
    list_ptr,
    slots_ptr,
    bits_ptr,
    tile,
    slot,
    low,
    high,
    begin,
    end,
    keys,
    k_stride,
    k_pe_stride,
    v_stride,
    scale,
    WIDTH: tl.constexpr,
    VALUE: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The key blocks list[begin : end]; MASKED ones show the bits that they have and may pass the last key.

    tile, low and high are those of the first block, slot is the second one's.
    """
    n = tl.arange(0, BLOCK_KEYS)
    k_rows = n[None, :] * k_stride + tl.arange(0, WIDTH)[:, None]
    v_rows = n[:, None] * v_stride + tl.arange(0, VALUE)[None, :]
    if ROTARY:
        k_pe_rows = n[None, :] * k_pe_stride + tl.arange(0, ROTARY)[:, None]
    # A step ahead: the list's next block, the next block's bits, and the slot of the one after. Past the end stand
    # spare entries, so that no load needs a mask.
    for place in tl.range(begin, end):
        first = (tile * BLOCK_KEYS).to(tl.int64)
        k_tile = k_base + first * k_stride
        v_tile = v_base + first * v_stride
        if MASKED:
            inside = tile * BLOCK_KEYS + n < keys
            k = tl.load(k_tile + k_rows, mask=inside[None, :], other=0.0)
            v = tl.load(v_tile + v_rows, mask=inside[:, None], other=0.0)
        else:
            k = tl.load(k_tile + k_rows)
            v = tl.load(v_tile + v_rows)
        s = tl.dot(q, k, input_precision="ieee")
        if ROTARY:
            k_pe_tile = k_pe_base + first * k_pe_stride
            if MASKED:
                k_pe = tl.load(k_pe_tile + k_pe_rows, mask=inside[None, :], other=0.0)
            else:
                k_pe = tl.load(k_pe_tile + k_pe_rows)
            s = tl.dot(q_pe, k_pe, s, input_precision="ieee")
        tile = tl.load(list_ptr + place + 1)
        if MASKED:
            words = tl.where((n < 32)[None, :], low[:, None], high[:, None])
            s = tl.where(((words >> (n & 31)[None, :]) & 1) != 0, s, float("-inf"))
            low, high = visible_words(bits_ptr, slot, BLOCK_QUERIES, BLOCK_KEYS)
            slot = tl.load(slots_ptr + place + 2)
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
def block_sparse_attention_kernel(
    q_ptr,
    k_ptr,
    k_pe_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    schedule_ptr,
    full_ptr,
    partial_ptr,
    slots_ptr,
    bits_ptr,
    q_batch_stride,
    k_batch_stride,
    k_pe_batch_stride,
    v_batch_stride,
    q_token_stride,
    k_token_stride,
    k_pe_token_stride,
    v_token_stride,
    q_head_stride,
    k_head_stride,
    k_pe_head_stride,
    v_head_stride,
    map_batch_stride,
    map_head_stride,
    queries,
    keys,
    group,
    scale,
    WIDTH: tl.constexpr,
    VALUE: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    batch = tl.program_id(2).to(tl.int64)
    kv_head = (head // group).to(tl.int64)
    own_map = tl.program_id(2) * map_batch_stride + head * map_head_stride
    work = schedule_ptr + (own_map * tl.num_programs(0) + tl.program_id(0)) * WORK
    block = tl.load(work)
    full_begin = tl.load(work + 1)
    full_end = tl.load(work + 2)
    partial_begin = tl.load(work + 3)
    partial_end = tl.load(work + 4)
    full_tile = tl.load(work + 5)
    partial_tile = tl.load(work + 6)
    # Before the first loop, so that the second one waits for nothing but its keys.
    low, high = visible_words(bits_ptr, tl.load(work + 7), BLOCK_QUERIES, BLOCK_KEYS)
    slot = tl.load(slots_ptr + partial_begin + 1)
    lane = tl.arange(0, BLOCK_QUERIES)
    first_query = (block * BLOCK_QUERIES).to(tl.int64)
    valid = first_query + lane < queries
    # One 64-bit base a block: offsets within it fit 32 bits, and half the registers.
    q_base = q_ptr + batch * q_batch_stride + head.to(tl.int64) * q_head_stride + first_query * q_token_stride
    q_rows = q_base + (lane * q_token_stride)[:, None]
    q = tl.load(q_rows + tl.arange(0, WIDTH)[None, :], mask=valid[:, None], other=0.0)
    q_pe = q
    if ROTARY:
        q_pe = tl.load(q_rows + WIDTH + tl.arange(0, ROTARY)[None, :], mask=valid[:, None], other=0.0)
    k_base = k_ptr + batch * k_batch_stride + kv_head * k_head_stride
    k_pe_base = k_pe_ptr + batch * k_pe_batch_stride + kv_head * k_pe_head_stride
    v_base = v_ptr + batch * v_batch_stride + kv_head * v_head_stride
    acc = tl.zeros((BLOCK_QUERIES, VALUE), dtype=tl.float32)
    peak = tl.full((BLOCK_QUERIES,), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((BLOCK_QUERIES,), dtype=tl.float32)
    log_scale = scale * LOG2_E
    acc, peak, weight = attend_listed(
        acc,
        peak,
        weight,
        q,
        q_pe,
        k_base,
        k_pe_base,
        v_base,
        full_ptr,
        slots_ptr,
        bits_ptr,
        full_tile,
        slot,
        low,
        high,
        full_begin,
        full_end,
        keys,
        k_token_stride,
        k_pe_token_stride,
        v_token_stride,
        log_scale,
        WIDTH,
        VALUE,
        ROTARY,
        BLOCK_QUERIES,
        BLOCK_KEYS,
        False,
    )
    acc, peak, weight = attend_listed(
        acc,
        peak,
        weight,
        q,
        q_pe,
        k_base,
        k_pe_base,
        v_base,
        partial_ptr,
        slots_ptr,
        bits_ptr,
        partial_tile,
        slot,
        low,
        high,
        partial_begin,
        partial_end,
        keys,
        k_token_stride,
        k_pe_token_stride,
        v_token_stride,
        log_scale,
        WIDTH,
        VALUE,
        ROTARY,
        BLOCK_QUERIES,
        BLOCK_KEYS,
        True,
    )
    empty = weight == 0.0
    whole = tl.where(empty, 1.0, weight)
    lse = tl.where(empty, float("-inf"), (peak + tl.log2(whole)) * LN_2)
    first_row = (batch * queries + first_query) * heads + head
    tl.store(lse_ptr + first_row + lane * heads, lse, mask=valid)
    tl.store(
        out_ptr + first_row * VALUE + (lane * heads * VALUE)[:, None] + tl.arange(0, VALUE)[None, :],
        (acc * (1.0 / whole)[:, None]).to(out_ptr.dtype.element_ty),
        mask=valid[:, None],
    )


_MODULE = "deepseek_engine.kernels.block_sparse_attention_triton"
_BATCH_STRIDES = ("q_batch_stride", "k_batch_stride", "k_pe_batch_stride", "v_batch_stride")
_STRIDES = (
    *("q_token_stride", "k_token_stride", "k_pe_token_stride", "v_token_stride"),
    *("q_head_stride", "k_head_stride", "k_pe_head_stride", "v_head_stride"),
)
TILES = {HOPPER: (128, 64), AMPERE: (64, 64), ADA: (64, 64)}
"""Queries and keys of the blocks that an architecture's rows take."""
_LISTS = ("schedule_ptr", "full_ptr", "partial_ptr", "slots_ptr", "bits_ptr")


def variant(
    name: str,
    widths: tuple[int, int, int],
    queries: int,
    keys: int,
    warps: int,
    stages: int,
    architectures: tuple[int, ...],
    stack_bytes: int = 0,
) -> Variant:
    """A row for exactly these (first part of a key, v, second part) `widths` and a map of exactly these blocks."""
    width, value, rotary = widths
    return Variant(
        "block_sparse_attention",
        f"{name}_{width}_{value}_{rotary}",
        {"WIDTH": width, "VALUE": value, "ROTARY": rotary, "BLOCK_QUERIES": queries, "BLOCK_KEYS": keys},
        num_warps=warps,
        num_stages=stages,
        architectures=architectures,
        when={
            "width": (width, width),
            "value": (value, value),
            "rotary": (rotary, rotary),
            "block_queries": (queries, queries),
            "block_keys": (keys, keys),
        },
        stack_bytes=stack_bytes,
        wide_tiles=queries >= 64,
    )


BLOCK_SPARSE_ATTENTION = Table(
    Kernel(
        name="block_sparse_attention",
        entry=f"{_MODULE}:block_sparse_attention_kernel",
        signature={
            "q_ptr": "*T",
            "k_ptr": "*T",
            "k_pe_ptr": "*T",
            "v_ptr": "*T",
            "out_ptr": "*T",
            "lse_ptr": "*fp32",
            **dict.fromkeys(_LISTS, "*i32"),
            **dict.fromkeys(_BATCH_STRIDES, "i64"),
            **dict.fromkeys(_STRIDES, "i32"),
            "map_batch_stride": "i32",
            "map_head_stride": "i32",
            "queries": "i32",
            "keys": "i32",
            "group": "i32",
            "scale": "fp32",
        },
        constants=("WIDTH", "VALUE", "ROTARY", "BLOCK_QUERIES", "BLOCK_KEYS"),
        divisible=frozenset(("q_ptr", "k_ptr", "k_pe_ptr", "v_ptr", "out_ptr", *_BATCH_STRIDES, *_STRIDES)),
    ),
    tuple(
        variant(name, widths, *TILES[architecture], warps, stages, (architecture,))
        for widths in ((64, 64, 0), (128, 128, 0), (128, 128, 64))
        for name, warps, stages, architecture in (("sm90", 8, 3, HOPPER), ("sm80", 8, 3, AMPERE), ("sm89", 8, 2, ADA))
    ),
)
TABLES = (BLOCK_SPARSE_ATTENTION,)
PLAN = LaunchPlan(
    "block_sparse_attention",
    (Step("block_sparse_attention", ("ceil_div(queries, BLOCK_QUERIES)", "heads", "batches")),),
)
PLANS = (PLAN,)


def tile(device: torch.device) -> tuple[int, int]:
    """Queries and keys of the blocks that a map for `device` must have.

    Raises:
        NoVariantError: no row is declared for the device.
    """
    architecture = nearest_architecture(launcher.capability(device))
    if architecture is None:
        raise NoVariantError(f"kernel block_sparse_attention has no row for sm_{launcher.capability(device)}")
    return TILES[architecture]


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: BlockMap,
    scale: float,
    *,
    k_pe: Tensor | None = None,
    row: Variant | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to the keys that a map shows.

    q [B, T, H, d], k [B, S, K, d] and v [B, S, K, w], H a multiple of K, any strides but the last, which is 1. Keys may
    be in two parts, k [B, S, K, n] and k_pe [B, S, d - n] or [B, S, K, d - n]: DeepSeek's 128 and 64, the second for
    all heads. A key of 192 in one piece is taken as such two. `blocks`: over T queries and S keys, of `tile(device)`.
    Returns out [B, T, H, w] and the log-sum-exp float32 [B, T, H]; 0 and -inf where a query sees no key.

    Raises:
        ValueError: the shapes do not belong together.
        NoVariantError: no row is declared for these widths, or for a map of these blocks on this device.
    """
    if k_pe is None and k.shape[-1] == 192:
        k, k_pe = k[..., :128], k[..., 128:]
    if k_pe is None:
        second = k[..., :0]
    else:
        second = k_pe if k_pe.dim() == 4 else k_pe.unsqueeze(2).expand(-1, -1, k.shape[2], -1)
    _check(q, k, second, v, blocks)
    batches, queries, heads, _ = q.shape
    out = torch.empty(batches, queries, heads, v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.empty(batches, queries, heads, dtype=torch.float32, device=q.device)
    dims = {
        "width": k.shape[-1],
        "value": v.shape[-1],
        "rotary": second.shape[-1],
        "block_queries": blocks.block_queries,
        "block_keys": blocks.block_keys,
        "queries": queries,
        "heads": heads,
        "batches": batches,
    }
    chosen = row or require(BLOCK_SPARSE_ATTENTION, q, dims)
    tensors = {"q": q, "k": k, "k_pe": second, "v": v}
    strides = {
        f"{name}_{axis}_stride": tensor.stride(place) if tensor.shape[-1] else 0
        for name, tensor in tensors.items()
        for place, axis in enumerate(("batch", "token", "head"))
    }
    launcher.launch(
        BLOCK_SPARSE_ATTENTION.kernel,
        chosen,
        PLAN.steps[0].blocks(dims, chosen),
        {
            **{f"{name}_ptr": tensor if tensor.shape[-1] else k for name, tensor in tensors.items()},
            "out_ptr": out,
            "lse_ptr": lse,
            "schedule_ptr": blocks.schedule,
            "full_ptr": blocks.full.blocks,
            "partial_ptr": blocks.partial.blocks,
            "slots_ptr": blocks.slots,
            "bits_ptr": blocks.patterns,
            **strides,
            "map_batch_stride": blocks.heads if blocks.batches > 1 else 0,
            "map_head_stride": 1 if blocks.heads > 1 else 0,
            "queries": queries,
            "keys": k.shape[1],
            "group": heads // k.shape[2],
            "scale": scale,
        },
    )
    return out, lse


def _check(q: Tensor, k: Tensor, second: Tensor, v: Tensor, blocks: BlockMap) -> None:
    batches, queries, heads, width = q.shape
    if width != k.shape[-1] + second.shape[-1]:
        raise ValueError(f"queries are {width} wide, keys {k.shape[-1]} + {second.shape[-1]}")
    if not k.shape[:3] == v.shape[:3] == second.shape[:3] or k.shape[0] != batches or heads % k.shape[2]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} differ in batch, keys or heads"
        )
    if (blocks.queries, blocks.keys) != (queries, k.shape[1]):
        raise ValueError(
            f"the map is of {blocks.queries} queries and {blocks.keys} keys, not of {queries} and {k.shape[1]}"
        )
    if blocks.batches not in (1, batches) or blocks.heads not in (1, heads):
        raise ValueError(
            f"the map is of {blocks.batches} batches and {blocks.heads} heads; {batches} or 1, and {heads} or 1 fit"
        )
    if any(tensor.shape[-1] and tensor.stride(-1) != 1 for tensor in (q, k, second, v)):
        raise ValueError("the last dimension of q, k and v has stride 1; make them contiguous")
