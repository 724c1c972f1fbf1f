# mypy: disable-error-code="no-untyped-def"
# Device functions have no types that mypy knows.
"""Decoding of grouped-query attention over the paged cache on a GPU; the reference is `paged_attention.py`.

GQA (arXiv:2305.13245); K = H is multi-head attention. Query head h reads key head k = h // (H / K):

    s[h, n] = q[h] . key[n, k] * scale                          n < visible(h)
    out[h]  = sum_n softmax(s)[n] value[n, k]                   [d]
    lse[h]  = ln sum_n exp s[h, n]                              float32, -inf where nothing is visible

A sequence brings 1 to 8 query tokens, the last of which sees the whole context and each earlier one a token less. The
query heads of one key head, of all the sequence's query tokens, are the rows of one product, so that a key head's part
of the cache is read once for up to BLOCK_ROWS of them.

Splits are chosen on the device by `mla_decode_triton.schedule_kernel`: a worker, once a key head, walks through the
sequences in its span of the line of tiles. A sequence inside one span is written at once, the parts of others go to
scratch and `mla_merge` joins them. Worker w's part of sequence s lies at w + s.

Bytes: 4 K d a cached token of two-byte elements; operations: 4 H d a token. Bound by memory up to some hundred rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_engine.kernels import launcher
from deepseek_engine.kernels.chaining import follow
from deepseek_engine.kernels.dispatch import require
from deepseek_engine.kernels.mla_decode_triton import (
    FIXED_SPLITS,
    MAX_QUERIES,
    MLA_MERGE,
    PAGES,
    DecodePlan,
    slots_of,
)
from deepseek_engine.kernels.variants import ADA, AMPERE, HOPPER, Kernel, LaunchPlan, Step, Table, Variant, ceil_div

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def attend_cached(
    acc,
    peak,
    weight,
    q,
    keys_ptr,
    values_ptr,
    table_row,
    begin,
    end,
    length,
    visible,
    keys_stride,
    values_stride,
    width,
    log_scale,
    WIDTH: tl.constexpr,
    WHOLE: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Online softmax (FlashAttention-2, arXiv:2307.08691) over tiles begin .. end of a sequence's cached tokens.

    MASKED tiles may pass the length or a row's visible tokens; every row sees all of the others. The pointers are those
    of one key head's first element in slot 0.
    """
    n = tl.arange(0, TILE)
    d = tl.arange(0, WIDTH)
    d_inside = d < (WIDTH if WHOLE else width)
    # A page holds a whole number of tiles: a tile's entries are neighbours and need one address.
    ADJACENT: tl.constexpr = PAGE > 0 and PAGE % TILE == 0
    if ADJACENT:
        where = tl.load(table_row + begin * TILE // PAGE, mask=begin * TILE < length, other=0)
    else:
        where = slots_of(table_row, begin * TILE + n, length, PAGE)
    for tile in tl.range(begin, end):
        # The next tile's place is asked for a tile ahead, so that no copy waits for its address.
        ahead = (tile + 1) * TILE
        if ADJACENT:
            slot = where.to(tl.int64) * PAGE + tile * TILE % PAGE
            keys = keys_ptr + slot * keys_stride + n[:, None] * keys_stride + d[None, :]
            values = values_ptr + slot * values_stride + n[:, None] * values_stride + d[None, :]
            where = tl.load(table_row + ahead // PAGE, mask=ahead < length, other=0)
        else:
            keys = keys_ptr + where[:, None] * keys_stride + d[None, :]
            values = values_ptr + where[:, None] * values_stride + d[None, :]
            where = slots_of(table_row, ahead + n, length, PAGE)
        position = tile * TILE + n
        if MASKED:
            inside = position < length
            mask = inside[:, None] if WHOLE else inside[:, None] & d_inside[None, :]
            k = tl.load(keys, mask=mask, other=0.0)
            v = tl.load(values, mask=mask, other=0.0)
        elif WHOLE:
            k = tl.load(keys)
            v = tl.load(values)
        else:
            k = tl.load(keys, mask=d_inside[None, :], other=0.0)
            v = tl.load(values, mask=d_inside[None, :], other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            s = tl.where(position[None, :] < visible[:, None], s, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(s, axis=1) * log_scale)
        # Where nothing has been visible yet the peak is -inf, and -inf less -inf is no number.
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
        p = tl.exp2(s * log_scale - shift[:, None])
        fade = tl.exp2(peak - shift)
        weight = weight * fade + tl.sum(p, axis=1)
        acc = acc * fade[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        peak = new_peak
    return acc, peak, weight


@triton.jit
def grouped_decode_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    table_rows_ptr,
    lengths_ptr,
    query_starts_ptr,
    plan_ptr,
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    q_token_stride,
    q_head_stride,
    keys_stride,
    values_stride,
    table_stride,
    sequences,
    key_heads,
    group,
    width,
    part_rows,
    scale,
    WIDTH: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
    # Key heads lie beside each other in a slot: programs that start together read neighbouring memory.
    key_head = tl.program_id(0) % key_heads
    row_block = tl.program_id(0) // key_heads
    worker = tl.program_id(1)
    heads = key_heads * group
    span = tl.load(plan_ptr)
    tile = worker * span
    end = tl.minimum(tile + span, tl.load(plan_ptr + 1 + sequences))
    sequence = tl.load(plan_ptr + 2 + sequences + worker)
    lane = tl.arange(0, BLOCK_ROWS)
    d = tl.arange(0, WIDTH)
    d_inside = d < (WIDTH if WHOLE else width)
    head_offset = key_head * (WIDTH if WHOLE else width)
    while tile < end:
        first_tile = tl.load(plan_ptr + 1 + sequence)
        last_tile = tl.load(plan_ptr + 2 + sequence)
        stop = tl.minimum(end, last_tile)
        if stop > tile:
            length = tl.load(lengths_ptr + sequence)
            query_start = tl.load(query_starts_ptr + sequence)
            queries = tl.load(query_starts_ptr + sequence + 1) - query_start
            if row_block * BLOCK_ROWS < queries * group:
                # Rows past the last stand in for it and are not stored. That a row's offset hangs on what the loop
                # loads keeps it in the loop, instead of in registers all along; and it fits 32 bits.
                last = queries * group - row_block * BLOCK_ROWS - 1
                valid = lane <= last
                row = row_block * BLOCK_ROWS + tl.minimum(lane, last)
                query = row // group
                head = key_head * group + row % group
                first_token = query_start.to(tl.int64)
                q = tl.load(
                    q_ptr
                    + first_token * q_token_stride
                    + (query * q_token_stride + head * q_head_stride)[:, None]
                    + d[None, :],
                    mask=d_inside[None, :],
                    other=0.0,
                )
                table_row = table_ptr + tl.load(table_rows_ptr + sequence).to(tl.int64) * table_stride
                acc, peak, weight = attend_cached(
                    tl.zeros((BLOCK_ROWS, WIDTH), dtype=tl.float32),
                    tl.full((BLOCK_ROWS,), float("-inf"), dtype=tl.float32),
                    tl.zeros((BLOCK_ROWS,), dtype=tl.float32),
                    q,
                    keys_ptr + head_offset,
                    values_ptr + head_offset,
                    table_row,
                    tile - first_tile,
                    # With fixed splits there is room after a sequence's last tile.
                    tl.minimum(stop - first_tile, tl.cdiv(length, TILE)),
                    length,
                    length - queries + query + 1,
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
                out = acc * (1.0 / total)[:, None]
                lse = tl.where(empty, float("-inf"), (peak + tl.log2(total)) * LN_2)
                # Rows of a token are kept in the order of its heads, as the merge reads them.
                place = query * heads + head
                mask = valid[:, None] & d_inside[None, :]
                if (tile == first_tile) & (stop == last_tile):
                    first_row = first_token * heads
                    tl.store(lse_ptr + first_row + place, lse, mask=valid)
                    tl.store(
                        out_ptr + first_row * width + (place * (WIDTH if WHOLE else width))[:, None] + d[None, :],
                        out.to(out_ptr.dtype.element_ty),
                        mask=mask,
                    )
                else:
                    first_part = (worker + sequence).to(tl.int64) * part_rows
                    tl.store(part_lse_ptr + first_part + place, lse, mask=valid)
                    tl.store(part_ptr + first_part * WIDTH + (place * WIDTH)[:, None] + d[None, :], out, mask=mask)
            tile = stop
        sequence += 1


_MODULE = "deepseek_engine.kernels.grouped_decode_triton"
_ANY = (1, 2**20)


@dataclass(frozen=True, slots=True)
class Tiling:
    """A way to cut the product, before the page size is filled in."""

    name: str
    width: int
    """WIDTH, a power of two."""
    rows: int
    """BLOCK_ROWS; more rows of a key head than these read its cache again."""
    tile: int
    warps: int
    stages: int
    architectures: tuple[int, ...]
    for_rows: tuple[int, int]
    sequences: tuple[int, int] = _ANY
    key_heads: tuple[int, int] = _ANY
    whole: bool = True
    """Whether heads are exactly `width` wide, or padded to it."""
    blocks: int = 2
    stack_bytes: int = 0
    pages: tuple[int, ...] = PAGES

    def variant(self, page: int) -> Variant:
        return Variant(
            "grouped_decode",
            f"{self.name}_page{page}",
            {
                "WIDTH": self.width,
                "WHOLE": int(self.whole),
                "BLOCK_ROWS": self.rows,
                "TILE": self.tile,
                "PAGE": page,
            },
            num_warps=self.warps,
            num_stages=self.stages,
            architectures=self.architectures,
            when={
                "rows": self.for_rows,
                "sequences": self.sequences,
                "key_heads": self.key_heads,
                "page": (page, page),
                "width": (self.width if self.whole else 1, self.width),
            },
            stack_bytes=self.stack_bytes,
            blocks_per_multiprocessor=self.blocks,
            wide_tiles=self.rows >= 64,
        )


_ONE, _TWO = (1, 16), (1, 32)
_FEW, _MANY_KEY_HEADS = (1, 15), (17, 2**20)
_ALL = (AMPERE, ADA, HOPPER)
TILINGS = (
    # The four fastest of ten on an H200: one long sequence or many shorter ones, grouped heads or a key head each.
    Tiling("width128_rows16_few_heads_sm90", 128, 16, 64, 4, 5, (HOPPER,), _ONE, _FEW, _MANY_KEY_HEADS, blocks=1),
    Tiling("width128_rows16_few_sm90", 128, 16, 64, 8, 4, (HOPPER,), _ONE, _FEW, blocks=1),
    Tiling("width128_rows16_heads_sm90", 128, 16, 64, 4, 3, (HOPPER,), _ONE, key_heads=_MANY_KEY_HEADS),
    Tiling("width128_rows16_sm90", 128, 16, 32, 2, 4, (HOPPER,), _ONE, blocks=4),
    Tiling("width128_rows32_sm90", 128, 32, 64, 4, 3, (HOPPER,), _TWO),
    Tiling("width128_rows64_sm90", 128, 64, 64, 4, 3, (HOPPER,), _ANY),
    Tiling("width128_rows16", 128, 16, 32, 4, 3, (AMPERE, ADA), _ONE),
    Tiling("width128_rows32", 128, 32, 32, 4, 3, (AMPERE, ADA), _TWO, blocks=1),
    Tiling("width128_rows64", 128, 64, 32, 4, 3, (AMPERE, ADA), _ANY, blocks=1),
    Tiling("width64_rows16", 64, 16, 64, 4, 3, _ALL, _ONE),
    Tiling("width64_rows32", 64, 32, 64, 4, 3, _ALL, _TWO, blocks=1),
    Tiling("width64_rows64", 64, 64, 64, 4, 3, _ALL, _ANY, blocks=1),
    Tiling("padded128", 128, 16, 32, 4, 3, _ALL, _ANY, whole=False),
)
_STRIDES = ("q_token_stride", "q_head_stride", "keys_stride", "values_stride")
GROUPED_DECODE = Table(
    Kernel(
        name="grouped_decode",
        entry=f"{_MODULE}:grouped_decode_kernel",
        signature={
            "q_ptr": "*T",
            "keys_ptr": "*T",
            "values_ptr": "*T",
            "table_ptr": "*i32",
            "table_rows_ptr": "*i32",
            "lengths_ptr": "*i32",
            "query_starts_ptr": "*i32",
            "plan_ptr": "*i32",
            "out_ptr": "*T",
            "lse_ptr": "*fp32",
            "part_ptr": "*fp32",
            "part_lse_ptr": "*fp32",
            **dict.fromkeys(_STRIDES, "i32"),
            "table_stride": "i32",
            "sequences": "i32",
            "key_heads": "i32",
            "group": "i32",
            "width": "i32",
            "part_rows": "i32",
            "scale": "fp32",
        },
        constants=("WIDTH", "WHOLE", "BLOCK_ROWS", "TILE", "PAGE"),
        divisible=frozenset(("q_ptr", "keys_ptr", "values_ptr", "out_ptr", "part_ptr", *_STRIDES, "width")),
        chained=True,
    ),
    tuple(tiling.variant(page) for tiling in TILINGS for page in tiling.pages),
)
TABLES = (GROUPED_DECODE,)
PLAN = LaunchPlan(
    "grouped_decode",
    (
        Step("mla_schedule", ("ceil_div(workers, BLOCK_WORKERS)",)),
        Step("grouped_decode", ("key_heads * ceil_div(rows, BLOCK_ROWS)", "workers")),
        Step("mla_merge", ("sequences", "key_heads * rows")),
    ),
    workspaces={
        "plan": "4 * (2 + sequences + workers)",
        "parts": "4 * (workers + sequences) * key_heads * rows * WIDTH",
        "part_lse": "4 * (workers + sequences) * key_heads * rows",
    },
)
"""The schedule runs once a step; the other two once a layer. `rows` are those of one key head; workspaces are over the
decode row's constants."""
PLANS = (PLAN,)


@dataclass(slots=True)
class GroupedDecodePlan(DecodePlan):
    """What every layer's decode of one step shares. Its tensors may be refilled between replays of a graph."""

    key_heads: int

    @property
    def dims(self) -> dict[str, int]:
        return {
            "workers": self.workers,
            "sequences": self.lengths.shape[0],
            "key_heads": self.key_heads,
            "rows": self.heads // self.key_heads * self.max_queries,
            "tile": self.variant.constants["TILE"],
        }


def grouped_decode_plan(
    lengths: Tensor,
    query_starts: Tensor,
    tables: Tensor,
    *,
    page: int,
    heads: int,
    key_heads: int,
    width: int,
    dtype: torch.dtype,
    max_queries: int = 1,
    table_rows: Tensor | None = None,
    fixed_tokens: int = 0,
    workers: int | None = None,
    variant: Variant | None = None,
) -> GroupedDecodePlan:
    """Choose a row, reserve scratch and cut the work. `workers` and `variant` force a number of spans and a row.

    lengths int32 [R], the step's own tokens included, 0 for a padded row; query_starts int32 [R + 1], at most
    `max_queries` apart; tables int32 [rows, blocks] of blocks of `page` tokens, or [rows, tokens] of slots where page
    is 0; table_rows int32 [R], the row of `tables` that each sequence uses, by default its own. `fixed_tokens` as for
    `mla_decode_triton.decode_plan`.

    Raises:
        ValueError: more than MAX_QUERIES query tokens a sequence, which are prefill; heads that do not divide.
        NoVariantError: no row for the page size or the width.
    """
    if not 1 <= max_queries <= MAX_QUERIES:
        raise ValueError(f"decode takes 1 to {MAX_QUERIES} query tokens a sequence, not {max_queries}; use prefill")
    group = group_size(heads, key_heads)
    device, sequences = lengths.device, lengths.shape[0]
    dims = {"rows": group * max_queries, "sequences": sequences, "key_heads": key_heads, "page": page, "width": width}
    wanted = {**dims, "sequences": 1} if fixed_tokens else dims
    row = variant or require(GROUPED_DECODE, torch.empty(0, dtype=dtype, device=device), wanted)
    split_tiles = ceil_div(ceil_div(fixed_tokens, FIXED_SPLITS), row.constants["TILE"])
    if split_tiles:
        workers = sequences * FIXED_SPLITS
    if workers is None:
        columns = key_heads * ceil_div(dims["rows"], row.constants["BLOCK_ROWS"])
        workers = max(1, launcher.multiprocessors(device) * row.blocks_per_multiprocessor // columns)
    sizes = PLAN.workspace_bytes(dims | {"workers": workers}, row.constants)
    plan = GroupedDecodePlan(
        lengths=lengths,
        query_starts=query_starts,
        tables=tables,
        table_rows=own_rows(sequences, device) if table_rows is None else table_rows,
        page=page,
        heads=heads,
        max_queries=max_queries,
        variant=row,
        workers=workers,
        plan=torch.empty(sizes["plan"] // 4, dtype=torch.int32, device=device),
        parts=torch.empty(sizes["parts"] // 4, dtype=torch.float32, device=device),
        part_lse=torch.empty(sizes["part_lse"] // 4, dtype=torch.float32, device=device),
        split_tiles=split_tiles,
        key_heads=key_heads,
    )
    plan.schedule()
    return plan


def group_size(heads: int, key_heads: int) -> int:
    """Query heads a key head.

    Raises:
        ValueError: they do not divide.
    """
    if heads % key_heads:
        raise ValueError(f"{heads} query heads are no multiple of {key_heads} key heads")
    return heads // key_heads


def own_rows(sequences: int, device: torch.device) -> Tensor:
    """int32 [R]: every sequence's own row of the block table."""
    return torch.arange(sequences, dtype=torch.int32, device=device)


def grouped_decode(
    q: Tensor, keys: Tensor, values: Tensor, plan: GroupedDecodePlan, scale: float, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attend to the cache, which already holds the step's own entries.

    q [T, H, d], rotated, of any token and head strides that are multiples of 16 bytes, so a slice of a projection will
    do; keys and values [slots, K * d], one layer's planes; scale above 0. Returns `out` [T, H, d], contiguous, by
    default a new one of q's dtype, and the log-sum-exp float32 [T, H].
    """
    tokens, heads, width = q.shape
    out = torch.empty(tokens, heads, width, dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    dims, row = plan.dims, plan.variant
    shared: dict[str, Tensor | int | float] = {
        "query_starts_ptr": plan.query_starts,
        "plan_ptr": plan.plan,
        "out_ptr": out,
        "lse_ptr": lse,
        "part_ptr": plan.parts,
        "part_lse_ptr": plan.part_lse,
        "part_rows": dims["key_heads"] * dims["rows"],
    }
    launcher.launch(
        GROUPED_DECODE.kernel,
        row,
        PLAN.steps[1].blocks(dims, row),
        shared
        | {
            "q_ptr": q,
            "keys_ptr": keys,
            "values_ptr": values,
            "table_ptr": plan.tables,
            "table_rows_ptr": plan.table_rows,
            "lengths_ptr": plan.lengths,
            "q_token_stride": q.stride(0),
            "q_head_stride": q.stride(1),
            "keys_stride": keys.stride(0),
            "values_stride": values.stride(0),
            "table_stride": plan.tables.stride(0),
            "sequences": dims["sequences"],
            "key_heads": plan.key_heads,
            "group": heads // plan.key_heads,
            "width": width,
            "scale": scale,
        },
    )
    merge = require(MLA_MERGE, q, {"rank": row.constants["WIDTH"]})
    launcher.launch(
        MLA_MERGE.kernel, merge, PLAN.steps[2].blocks(dims, merge), shared | {"heads": heads, "rank": width}
    )
    return out, lse
