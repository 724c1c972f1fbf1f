# mypy: disable-error-code="no-untyped-def"
# Device functions have no types that mypy knows.
"""Absorbed multi-head latent attention over the paged cache on a GPU; the reference is `mla_attention.py`.

DeepSeek-V2 (arXiv:2405.04434, section 2.1.2). With q = [W_UK^T q_nope | q_pe] a head and a cache entry [c | k_pe]:

    s[h, n] = (q_c[h] . c[n] + q_pe[h] . k_pe[n]) * scale       n < visible(h)
    out[h]  = sum_n softmax(s)[n] c[n]                          [rank], W_UV is applied afterwards
    lse[h]  = ln sum_n exp s[h, n]                              float32, -inf where nothing is visible

A sequence brings 1 to 8 query tokens, the last of which sees the whole context and each earlier one a token less; its
queries of all heads are the rows of one product, so the cache is read once for up to BLOCK_ROWS of them.

Splits are chosen on the device, so that one captured launch serves any lengths. All tiles of all sequences form one
line; `schedule` cuts it into equal spans, one a worker, and a worker walks through the sequences in its span. A
sequence inside one span is written at once; the parts of others go to scratch and `merge` joins them. Worker w's part
of sequence s lies at w + s: walking along the line either number only grows, so no two parts meet. Where a result may
not depend on the other sequences, each takes a place of one size on the line, cut into FIXED_SPLITS spans.

Bytes: (rank + rope) a cached token; operations: 2 heads (2 rank + rope) a token. With 16 heads the kernel is bound by
memory, with 128 by arithmetic (H200).
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_engine.kernels import launcher
from deepseek_engine.kernels.chaining import follow
from deepseek_engine.kernels.dispatch import find, require
from deepseek_engine.kernels.variants import ADA, AMPERE, HOPPER, Kernel, LaunchPlan, Step, Table, Variant, ceil_div

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def schedule_kernel(
    lengths_ptr,
    plan_ptr,
    sequences,
    workers,
    least_tiles,
    splits,
    TILE: tl.constexpr,
    BLOCK_SEQUENCES: tl.constexpr,
    BLOCK_WORKERS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """plan = [tiles a worker | first tile of each sequence, and their number | first sequence of each worker]."""
    follow(CHAINED)
    sequence = tl.arange(0, BLOCK_SEQUENCES)
    length = tl.load(lengths_ptr + sequence, mask=sequence < sequences, other=0)
    tiles = (length + TILE - 1) // TILE
    if splits > 0:
        # Every sequence takes the same place, however short it is.
        tiles = tl.where(sequence < sequences, splits * least_tiles, 0)
    ends = tl.cumsum(tiles, axis=0)
    total = tl.sum(tiles, axis=0)
    span = least_tiles
    if splits == 0:
        span = tl.maximum((total + workers - 1) // workers, least_tiles)
    if tl.program_id(0) == 0:
        tl.store(plan_ptr, span)
        tl.store(plan_ptr + 1, 0)
        tl.store(plan_ptr + 2 + sequence, ends, mask=sequence < sequences)
    worker = tl.program_id(0) * BLOCK_WORKERS + tl.arange(0, BLOCK_WORKERS)
    before = (ends[None, :] <= (worker * span)[:, None]) & (sequence < sequences)[None, :]
    first = tl.sum(before.to(tl.int32), axis=1)
    tl.store(plan_ptr + 2 + sequences + worker, first, mask=worker < workers)


@triton.jit
def slots_of(table_row, position, length, PAGE: tl.constexpr):
    """int64: the cache slots of positions, 0 past the length; PAGE 0 is an explicit list of slots."""
    if PAGE == 0:
        return tl.load(table_row + position, mask=position < length, other=0).to(tl.int64)
    page = tl.load(table_row + position // PAGE, mask=position < length, other=0).to(tl.int64)
    return page * PAGE + position % PAGE


@triton.jit
def mla_decode_kernel(
    q_ptr,
    q_pe_ptr,
    cache_ptr,
    table_ptr,
    table_rows_ptr,
    lengths_ptr,
    query_starts_ptr,
    plan_ptr,
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    q_stride,
    q_pe_stride,
    cache_stride,
    table_stride,
    sequences,
    heads,
    rank,
    rotary,
    scale,
    RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
    worker = tl.program_id(0)
    row_block = tl.program_id(1)
    part_rows = tl.num_programs(1) * BLOCK_ROWS
    span = tl.load(plan_ptr)
    tile = worker * span
    end = tl.minimum(tile + span, tl.load(plan_ptr + 1 + sequences))
    sequence = tl.load(plan_ptr + 2 + sequences + worker)
    # A part of the rows is one product: all heads of a query token, then those of the next.
    lane = tl.arange(0, BLOCK_ROWS)
    latent = tl.arange(0, RANK)
    rope = tl.arange(0, ROTARY)
    n = tl.arange(0, TILE)
    latent_inside = latent < (RANK if WHOLE else rank)
    rope_inside = rope < (ROTARY if WHOLE else rotary)
    # A literal stride turns a tile's addresses into one base and constants.
    STRIDE = RANK + ROTARY if WHOLE else cache_stride
    # A page holds a whole number of tiles: a tile's entries are neighbours and need one address.
    ADJACENT: tl.constexpr = PAGE > 0 and PAGE % TILE == 0
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    while tile < end:
        first_tile = tl.load(plan_ptr + 1 + sequence)
        last_tile = tl.load(plan_ptr + 2 + sequence)
        stop = tl.minimum(end, last_tile)
        if stop > tile:
            length = tl.load(lengths_ptr + sequence)
            query_start = tl.load(query_starts_ptr + sequence)
            queries = tl.load(query_starts_ptr + sequence + 1) - query_start
            if row_block * BLOCK_ROWS < queries * heads:
                # Rows past the last stand in for it and are not stored. That a row's offset hangs on what the loop
                # loads keeps it in the loop, instead of in registers all along; and it fits 32 bits.
                last = queries * heads - row_block * BLOCK_ROWS - 1
                valid = lane <= last
                near = tl.minimum(lane, last)
                visible = length - queries + (row_block * BLOCK_ROWS + near) // heads + 1
                first_row = query_start.to(tl.int64) * heads + row_block * BLOCK_ROWS
                q_base = q_ptr + first_row * q_stride
                q_pe_base = q_pe_ptr + first_row * q_pe_stride
                if TRANSPOSED:
                    q = tl.load(
                        q_base + (near * q_stride)[None, :] + latent[:, None],
                        mask=latent_inside[:, None],
                        other=0.0,
                    )
                    q_pe = tl.load(
                        q_pe_base + (near * q_pe_stride)[None, :] + rope[:, None],
                        mask=rope_inside[:, None],
                        other=0.0,
                    )
                    acc = tl.zeros((RANK, BLOCK_ROWS), dtype=tl.float32)
                else:
                    q = tl.load(
                        q_base + (near * q_stride)[:, None] + latent[None, :],
                        mask=latent_inside[None, :],
                        other=0.0,
                    )
                    q_pe = tl.load(
                        q_pe_base + (near * q_pe_stride)[:, None] + rope[None, :],
                        mask=rope_inside[None, :],
                        other=0.0,
                    )
                    acc = tl.zeros((BLOCK_ROWS, RANK), dtype=tl.float32)
                peak = tl.full((BLOCK_ROWS,), float("-inf"), dtype=tl.float32)
                weight = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
                table_row = table_ptr + tl.load(table_rows_ptr + sequence).to(tl.int64) * table_stride
                begin = tile - first_tile
                if ADJACENT:
                    where = tl.load(table_row + begin * TILE // PAGE)
                else:
                    where = slots_of(table_row, begin * TILE + n, length, PAGE)
                # With fixed splits there is room after a sequence's last tile.
                for j in tl.range(begin, tl.minimum(stop - first_tile, tl.cdiv(length, TILE))):
                    position = j * TILE + n
                    inside = position < length
                    # The next tile's place is asked for a tile ahead, so that no copy waits for its address.
                    if ADJACENT:
                        base = cache_ptr + (where.to(tl.int64) * PAGE + j * TILE % PAGE) * STRIDE
                        entries = base + n[:, None] * STRIDE
                        ahead = (j + 1) * TILE
                        where = tl.load(table_row + ahead // PAGE, mask=ahead < length, other=0)
                    else:
                        entries = cache_ptr + where[:, None] * STRIDE
                        where = slots_of(table_row, (j + 1) * TILE + n, length, PAGE)
                    if WHOLE:
                        c = tl.load(entries + latent[None, :], mask=inside[:, None], other=0.0)
                        k_pe = tl.load(entries + RANK + rope[None, :], mask=inside[:, None], other=0.0)
                    else:
                        c = tl.load(entries + latent[None, :], mask=inside[:, None] & latent_inside[None, :], other=0.0)
                        k_pe = tl.load(
                            entries + rank + rope[None, :], mask=inside[:, None] & rope_inside[None, :], other=0.0
                        )
                    if TRANSPOSED:
                        s = tl.dot(c, q, input_precision="ieee")
                        s = tl.dot(k_pe, q_pe, s, input_precision="ieee") * (scale * LOG2_E)
                        s = tl.where(position[:, None] < visible[None, :], s, float("-inf"))
                        new_peak = tl.maximum(peak, tl.max(s, axis=0))
                        # Where nothing has been visible yet the peak is -inf, and -inf less -inf is no number.
                        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
                        p = tl.exp2(s - shift[None, :])
                        fade = tl.exp2(peak - shift)
                        weight = weight * fade + tl.sum(p, axis=0)
                        acc = acc * fade[None, :]
                        acc = tl.dot(tl.trans(c), p.to(DTYPE), acc, input_precision="ieee")
                    else:
                        s = tl.dot(q, tl.trans(c), input_precision="ieee")
                        s = tl.dot(q_pe, tl.trans(k_pe), s, input_precision="ieee") * (scale * LOG2_E)
                        s = tl.where(position[None, :] < visible[:, None], s, float("-inf"))
                        new_peak = tl.maximum(peak, tl.max(s, axis=1))
                        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
                        p = tl.exp2(s - shift[:, None])
                        fade = tl.exp2(peak - shift)
                        weight = weight * fade + tl.sum(p, axis=1)
                        acc = acc * fade[:, None]
                        acc = tl.dot(p.to(DTYPE), c, acc, input_precision="ieee")
                    peak = new_peak
                empty = weight == 0.0
                inverse = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, weight))
                lse = tl.where(empty, float("-inf"), (peak + tl.log2(tl.where(empty, 1.0, weight))) * LN_2)
                first_part = (worker + sequence).to(tl.int64) * part_rows + row_block * BLOCK_ROWS
                out_base = out_ptr + first_row * rank
                part_base = part_ptr + first_part * RANK
                if (tile == first_tile) & (stop == last_tile):
                    tl.store(lse_ptr + first_row + lane, lse, mask=valid)
                    if TRANSPOSED:
                        tl.store(
                            out_base + (near * (RANK if WHOLE else rank))[None, :] + latent[:, None],
                            (acc * inverse[None, :]).to(DTYPE),
                            mask=valid[None, :] & latent_inside[:, None],
                        )
                    else:
                        tl.store(
                            out_base + (near * (RANK if WHOLE else rank))[:, None] + latent[None, :],
                            (acc * inverse[:, None]).to(DTYPE),
                            mask=valid[:, None] & latent_inside[None, :],
                        )
                else:
                    tl.store(part_lse_ptr + first_part + lane, lse, mask=valid)
                    if TRANSPOSED:
                        tl.store(
                            part_base + (near * RANK)[None, :] + latent[:, None],
                            acc * inverse[None, :],
                            mask=valid[None, :] & latent_inside[:, None],
                        )
                    else:
                        tl.store(
                            part_base + (near * RANK)[:, None] + latent[None, :],
                            acc * inverse[:, None],
                            mask=valid[:, None] & latent_inside[None, :],
                        )
            tile = stop
        sequence += 1


@triton.jit
def mla_merge_kernel(
    query_starts_ptr,
    plan_ptr,
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    heads,
    rank,
    part_rows,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Join a row's parts: out = sum_i exp(lse_i - lse) out_i. Parts with lse -inf weigh nothing.

    PARTS of them are read at once: a long sequence alone is cut into one for every multiprocessor.
    """
    follow(CHAINED)
    sequence = tl.program_id(0)
    row = tl.program_id(1)
    query = row // heads
    query_start = tl.load(query_starts_ptr + sequence)
    queries = tl.load(query_starts_ptr + sequence + 1) - query_start
    if query < queries:
        span = tl.load(plan_ptr)
        first_tile = tl.load(plan_ptr + 1 + sequence)
        last_tile = tl.load(plan_ptr + 2 + sequence)
        first = first_tile // span
        last = (last_tile - 1) // span
        # One part was written by its worker already; no tiles at all leave the row to be defined here.
        if (first != last) | (first_tile == last_tile):
            latent = tl.arange(0, RANK)
            acc = tl.zeros((RANK,), dtype=tl.float32)
            peak = float("-inf")
            weight = 0.0
            if first_tile < last_tile:
                for start in tl.range(first, last + 1, PARTS):
                    worker = start + tl.arange(0, PARTS)
                    part = (worker + sequence).to(tl.int64) * part_rows + row
                    part_lse = tl.load(part_lse_ptr + part, mask=worker <= last, other=float("-inf")) * LOG2_E
                    out = tl.load(
                        part_ptr + part[:, None] * RANK + latent[None, :],
                        mask=(worker <= last)[:, None] & (latent < rank)[None, :],
                        other=0.0,
                    )
                    new_peak = tl.maximum(peak, tl.max(part_lse, axis=0))
                    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
                    fade = tl.exp2(peak - shift)
                    share = tl.exp2(part_lse - shift)
                    acc = acc * fade + tl.sum(out * share[:, None], axis=0)
                    weight = weight * fade + tl.sum(share, axis=0)
                    peak = new_peak
            empty = weight == 0.0
            whole = tl.where(empty, 1.0, weight)
            target = (query_start.to(tl.int64) + query) * heads + row % heads
            tl.store(lse_ptr + target, tl.where(empty, float("-inf"), (peak + tl.log2(whole)) * LN_2))
            tl.store(out_ptr + target * rank + latent, (acc / whole).to(out_ptr.dtype.element_ty), mask=latent < rank)


_MODULE = "deepseek_engine.kernels.mla_decode_triton"
MAX_QUERIES = 8
LEAST_TILES = 1
"""Tiles that a worker takes at least: even the finest cuts save more than the merge of their parts costs (H200)."""
FIXED_SPLITS = 8
"""Parts of a sequence where the cuts may not depend on what else is in the batch."""


def _schedule_rows() -> tuple[Variant, ...]:
    return tuple(
        Variant(
            "mla_schedule",
            f"tile{tile}_sequences{block}",
            {"TILE": tile, "BLOCK_SEQUENCES": block, "BLOCK_WORKERS": 16},
            num_warps=4,
            num_stages=1,
            when={"tile": (tile, tile), "sequences": (1, block)},
        )
        for tile in (32, 64)
        for block in (128, 1024)
    )


SCHEDULE = Table(
    Kernel(
        name="mla_schedule",
        entry=f"{_MODULE}:schedule_kernel",
        signature={
            "lengths_ptr": "*i32",
            "plan_ptr": "*i32",
            "sequences": "i32",
            "workers": "i32",
            "least_tiles": "i32",
            "splits": "i32",
        },
        constants=("TILE", "BLOCK_SEQUENCES", "BLOCK_WORKERS"),
        chained=True,
    ),
    _schedule_rows(),
)


PAGES = (64, 32, 16, 0)
"""Tokens a block of the table; 0 for an explicit list of slots."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """A way to cut the product, before the page size is filled in."""

    name: str
    rows: int
    """BLOCK_ROWS; more rows of a sequence than these read the cache again."""
    tile: int
    warps: int
    stages: int
    architectures: tuple[int, ...]
    for_rows: tuple[int, int]
    rank: int = 512
    rotary: int = 64
    transposed: bool = False
    stack_bytes: int = 0
    blocks: int = 1
    sequences: tuple[int, int] = (1, 2**20)
    pages: tuple[int, ...] = PAGES

    def variant(self, page: int) -> Variant:
        whole = self.rank == 512
        widths = (
            {"rank": (512, 512), "rotary": (64, 64)} if whole else {"rank": (1, self.rank), "rotary": (1, self.rotary)}
        )
        return Variant(
            "mla_decode",
            f"{self.name}_page{page}",
            {
                "RANK": self.rank,
                "ROTARY": self.rotary,
                "WHOLE": int(whole),
                "BLOCK_ROWS": self.rows,
                "TILE": self.tile,
                "PAGE": page,
                "TRANSPOSED": int(self.transposed),
            },
            num_warps=self.warps,
            num_stages=self.stages,
            architectures=self.architectures,
            when={"rows": self.for_rows, "sequences": self.sequences, "page": (page, page), **widths},
            stack_bytes=self.stack_bytes,
            blocks_per_multiprocessor=self.blocks,
            wide_tiles=self.rows >= 64 and self.rank == 512,
        )


_ANY = (1, 2**20)
TILINGS = (
    # What little local memory there is is written before and read after the loop over tiles, not in it.
    Tiling("rows16_sm90", 16, 64, 4, 3, (HOPPER,), (1, 16), sequences=(64, 2**20), pages=(64, 0)),
    Tiling("rows16_few_sm90", 16, 64, 8, 3, (HOPPER,), (1, 16)),
    # Where MLA_DECODE_WIDE has no row.
    Tiling("rows64_sm90", 64, 64, 8, 2, (HOPPER,), _ANY, stack_bytes=64),
    Tiling("rows16_sm80", 16, 32, 8, 4, (AMPERE,), _ANY),
    Tiling("rows16_sm89", 16, 32, 8, 3, (ADA,), _ANY, stack_bytes=8),
    Tiling("narrow64", 16, 32, 4, 3, (AMPERE, ADA, HOPPER), _ANY, rank=64, rotary=64, blocks=2, pages=(64, 16, 0)),
    Tiling("narrow256", 16, 32, 4, 3, (AMPERE, ADA, HOPPER), _ANY, rank=256, rotary=64, pages=(64, 16)),
)
_POINTERS = ("q_ptr", "q_pe_ptr", "cache_ptr", "out_ptr", "part_ptr")
_STRIDES = ("q_stride", "q_pe_stride", "cache_stride")
MLA_DECODE = Table(
    Kernel(
        name="mla_decode",
        entry=f"{_MODULE}:mla_decode_kernel",
        signature={
            "q_ptr": "*T",
            "q_pe_ptr": "*T",
            "cache_ptr": "*T",
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
            "heads": "i32",
            "rank": "i32",
            "rotary": "i32",
            "scale": "fp32",
        },
        constants=("RANK", "ROTARY", "WHOLE", "BLOCK_ROWS", "TILE", "PAGE", "TRANSPOSED"),
        divisible=frozenset((*_POINTERS, *_STRIDES, "rank", "rotary")),
        chained=True,
    ),
    tuple(tiling.variant(page) for tiling in TILINGS for page in tiling.pages),
)
MLA_MERGE = Table(
    Kernel(
        name="mla_merge",
        entry=f"{_MODULE}:mla_merge_kernel",
        signature={
            "query_starts_ptr": "*i32",
            "plan_ptr": "*i32",
            "out_ptr": "*T",
            "lse_ptr": "*fp32",
            "part_ptr": "*fp32",
            "part_lse_ptr": "*fp32",
            "heads": "i32",
            "rank": "i32",
            "part_rows": "i32",
        },
        constants=("RANK", "PARTS"),
        divisible=frozenset(("out_ptr", "part_ptr", "rank")),
        chained=True,
    ),
    tuple(
        Variant(
            "mla_merge",
            f"rank{rank}",
            {"RANK": rank, "PARTS": 8},
            num_warps=warps,
            num_stages=1,
            when={"rank": (1, rank)},
        )
        for rank, warps in ((64, 1), (128, 1), (256, 1), (512, 2))
    ),
)
MLA_DECODE_WIDE = Table(
    replace(
        MLA_DECODE.kernel,
        name="mla_decode_wide",
        entry="deepseek_engine.kernels.mla_decode_gluon:mla_decode_wide_kernel",
        constants=("RANK", "ROTARY", "BLOCK_ROWS", "TILE"),
    ),
    (
        Variant(
            "mla_decode_wide",
            "rows64_page64",
            {"RANK": 512, "ROTARY": 64, "BLOCK_ROWS": 64, "TILE": 64},
            num_warps=8,
            architectures=(HOPPER,),
            when={"rows": (17, 2**20), "page": (64, 64), "rank": (512, 512), "rotary": (64, 64)},
            # Addresses of what comes before and after the loop over tiles, none of it in the loop.
            stack_bytes=96,
            wide_tiles=True,
        ),
    ),
)
"""MLA_DECODE's twin for many heads."""
_KERNELS = {table.kernel.name: table.kernel for table in (MLA_DECODE, MLA_DECODE_WIDE)}
TABLES = (SCHEDULE, MLA_DECODE, MLA_DECODE_WIDE, MLA_MERGE)
PLAN = LaunchPlan(
    "mla_decode",
    (
        Step("mla_schedule", ("ceil_div(workers, BLOCK_WORKERS)",)),
        Step("mla_decode", ("workers", "ceil_div(rows, BLOCK_ROWS)")),
        Step("mla_merge", ("sequences", "rows")),
    ),
    workspaces={
        "plan": "4 * (2 + sequences + workers)",
        "parts": "4 * (workers + sequences) * ceil_div(rows, BLOCK_ROWS) * BLOCK_ROWS * RANK",
        "part_lse": "4 * (workers + sequences) * ceil_div(rows, BLOCK_ROWS) * BLOCK_ROWS",
    },
)
"""The schedule runs once a step; the other two once a layer. Workspaces are over the decode row's constants. Where
MLA_DECODE_WIDE has a row, it is launched in mla_decode's place with the same grid."""
PLANS = (PLAN,)


@dataclass(slots=True)
class DecodePlan:
    """What every layer's decode of one step shares. Its tensors may be refilled between replays of a graph."""

    lengths: Tensor
    """int32 [R]: tokens in the cache, the step's own included; 0 for a padded row."""
    query_starts: Tensor
    """int32 [R + 1]: row r owns query tokens query_starts[r] : query_starts[r + 1], at most `max_queries` of them."""
    tables: Tensor
    """int32 [S, max_blocks], or int32 [S, max_tokens] of slots where page is 0."""
    table_rows: Tensor
    """int32 [R]: the row of `tables` that a sequence reads."""
    page: int
    heads: int
    max_queries: int
    variant: Variant
    workers: int
    plan: Tensor
    parts: Tensor
    part_lse: Tensor
    split_tiles: int
    """Tiles of each of FIXED_SPLITS parts of every sequence; 0 cuts by the lengths of all."""

    @property
    def dims(self) -> dict[str, int]:
        return {
            "workers": self.workers,
            "sequences": self.lengths.shape[0],
            "rows": self.heads * self.max_queries,
            "tile": self.variant.constants["TILE"],
        }

    def schedule(self) -> None:
        """Cut the step's tiles into spans, on the device. Call it whenever `lengths` have changed."""
        dims = self.dims
        row = require(SCHEDULE, self.parts, dims)
        launcher.launch(
            SCHEDULE.kernel,
            row,
            PLAN.steps[0].blocks(dims, row),
            {
                "lengths_ptr": self.lengths,
                "plan_ptr": self.plan,
                "sequences": dims["sequences"],
                "workers": self.workers,
                "least_tiles": self.split_tiles or LEAST_TILES,
                "splits": FIXED_SPLITS if self.split_tiles else 0,
            },
        )


def decode_plan(
    lengths: Tensor,
    query_starts: Tensor,
    tables: Tensor,
    *,
    page: int,
    heads: int,
    rank: int,
    rotary: int,
    dtype: torch.dtype,
    max_queries: int = 1,
    table_rows: Tensor | None = None,
    fixed_tokens: int = 0,
    workers: int | None = None,
    variant: Variant | None = None,
) -> DecodePlan:
    """Choose a row, reserve scratch and cut the work. `workers` and `variant` force a number of spans and a row.

    Without `table_rows` sequence r reads row r of `tables`. With `fixed_tokens`, the most tokens that a sequence can
    have, each is cut into FIXED_SPLITS parts of a size that depends on nothing else, and so its result does not either.

    Raises:
        ValueError: more than MAX_QUERIES query tokens a sequence; those are prefill.
        NoVariantError: no row for the page size or the widths.
    """
    if not 1 <= max_queries <= MAX_QUERIES:
        raise ValueError(f"decode takes 1 to {MAX_QUERIES} query tokens a sequence, not {max_queries}; use prefill")
    device = lengths.device
    rows, sequences = heads * max_queries, lengths.shape[0]
    probe = torch.empty(0, dtype=dtype, device=device)
    row = variant or _row(probe, rows, 1 if fixed_tokens else sequences, page, rank, rotary)
    row_blocks = ceil_div(rows, row.constants["BLOCK_ROWS"])
    split_tiles = ceil_div(ceil_div(fixed_tokens, FIXED_SPLITS), row.constants["TILE"])
    if split_tiles:
        workers = sequences * FIXED_SPLITS
    if workers is None:
        workers = max(1, launcher.multiprocessors(device) * row.blocks_per_multiprocessor // row_blocks)
    sizes = PLAN.workspace_bytes({"workers": workers, "sequences": sequences, "rows": rows}, row.constants)
    plan = DecodePlan(
        lengths=lengths,
        query_starts=query_starts,
        tables=tables,
        table_rows=torch.arange(sequences, dtype=torch.int32, device=device) if table_rows is None else table_rows,
        page=page,
        heads=heads,
        max_queries=max_queries,
        variant=row,
        workers=workers,
        plan=torch.empty(sizes["plan"] // 4, dtype=torch.int32, device=device),
        parts=torch.empty(sizes["parts"] // 4, dtype=torch.float32, device=device),
        part_lse=torch.empty(sizes["part_lse"] // 4, dtype=torch.float32, device=device),
        split_tiles=split_tiles,
    )
    plan.schedule()
    return plan


def _row(probe: Tensor, rows: int, sequences: int, page: int, rank: int, rotary: int) -> Variant:
    dims = {"rows": rows, "sequences": sequences, "page": page, "rank": rank, "rotary": rotary}
    # The interpreter knows the plain language alone.
    wide = None if launcher.interpreting() else find(MLA_DECODE_WIDE, probe, dims)
    return wide or require(MLA_DECODE, probe, dims)


def mla_decode(
    q: Tensor, q_pe: Tensor, plane: Tensor, plan: DecodePlan, scale: float, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attend to the cache, which already holds the step's own entries.

    q [T, H, rank], absorbed, and q_pe [T, H, rope], rotated: rows (token, head) at one stride each, a multiple of 16,
    so a slice of the last dimension will do. plane [slots, rank + rope], one layer's. Returns out [T, H, rank] in q's
    dtype and the log-sum-exp float32 [T, H].
    """
    tokens, heads, rank = q.shape
    rotary = q_pe.shape[-1]
    for name, tensor in (("q", q), ("q_pe", q_pe)):
        if tensor.stride(0) != heads * tensor.stride(1) or tensor.stride(2) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}: its heads must follow each other at one stride")
    out = torch.empty(tokens, heads, rank, dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    dims, row = plan.dims, plan.variant
    shared: dict[str, Tensor | int | float] = {
        "query_starts_ptr": plan.query_starts,
        "plan_ptr": plan.plan,
        "out_ptr": out,
        "lse_ptr": lse,
        "part_ptr": plan.parts,
        "part_lse_ptr": plan.part_lse,
        "heads": heads,
        "rank": rank,
    }
    launcher.launch(
        _KERNELS[row.kernel],
        row,
        PLAN.steps[1].blocks(dims, row),
        shared
        | {
            "q_ptr": q,
            "q_pe_ptr": q_pe,
            "cache_ptr": plane,
            "table_ptr": plan.tables,
            "table_rows_ptr": plan.table_rows,
            "lengths_ptr": plan.lengths,
            "q_stride": q.stride(1),
            "q_pe_stride": q_pe.stride(1),
            "cache_stride": plane.stride(0),
            "table_stride": plan.tables.stride(0),
            "sequences": dims["sequences"],
            "rotary": rotary,
            "scale": scale,
        },
    )
    block_rows = row.constants["BLOCK_ROWS"]
    merge = require(MLA_MERGE, q, {"rank": row.constants["RANK"]})
    launcher.launch(
        MLA_MERGE.kernel,
        merge,
        PLAN.steps[2].blocks(dims, merge),
        shared | {"part_rows": ceil_div(dims["rows"], block_rows) * block_rows},
    )
    return out, lse
