# mypy: disable-error-code="no-untyped-def"
# Device functions have no types that mypy knows.
"""Gathers entries of a paged cache on a GPU, sequence after sequence, for attention that reads them as one array.

    out[key_starts[r] + i] = cache[slot(r, first + i)]          i < key_starts[r + 1] - key_starts[r]
    slot(r, p) = tables[table_rows[r], p // page] * page + p % page

The plain form is an index_select by slots that the host knows; here the tables stay on the device. Memory-bound: 2
width elements a key.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_engine.kernels import launcher
from deepseek_engine.kernels.chaining import follow
from deepseek_engine.kernels.dispatch import require
from deepseek_engine.kernels.variants import Kernel, LaunchPlan, Step, Table, Variant


@triton.jit
def gather_entries_kernel(
    cache_ptr,
    table_ptr,
    table_rows_ptr,
    key_starts_ptr,
    out_ptr,
    cache_stride,
    table_stride,
    first,
    page,
    width,
    BLOCK_KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
    sequence = tl.program_id(1)
    begin = tl.load(key_starts_ptr + sequence)
    keys = tl.load(key_starts_ptr + sequence + 1) - begin
    key = tl.program_id(0) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    inside = key < keys
    position = first + key
    table_row = table_ptr + tl.load(table_rows_ptr + sequence).to(tl.int64) * table_stride
    block = tl.load(table_row + position // page, mask=inside, other=0).to(tl.int64)
    slot = block * page + position % page
    column = tl.arange(0, BLOCK)
    mask = inside[:, None] & (column < width)[None, :]
    entries = tl.load(cache_ptr + slot[:, None] * cache_stride + column[None, :], mask=mask, other=0.0)
    target = (begin + key).to(tl.int64) * width
    tl.store(out_ptr + target[:, None] + column[None, :], entries, mask=mask)


GATHER_ENTRIES = Table(
    Kernel(
        name="gather_entries",
        entry="deepseek_engine.kernels.paged_gather_triton:gather_entries_kernel",
        signature={
            "cache_ptr": "*T",
            "table_ptr": "*i32",
            "table_rows_ptr": "*i32",
            "key_starts_ptr": "*i32",
            "out_ptr": "*T",
            "cache_stride": "i32",
            "table_stride": "i32",
            "first": "i32",
            "page": "i32",
            "width": "i32",
        },
        constants=("BLOCK_KEYS", "BLOCK"),
        divisible=frozenset(("cache_ptr", "out_ptr", "cache_stride", "width")),
        chained=True,
    ),
    (
        Variant("gather_entries", "width128", {"BLOCK_KEYS": 32, "BLOCK": 128}, 4, 1, when={"width": (1, 128)}),
        Variant("gather_entries", "width1024", {"BLOCK_KEYS": 8, "BLOCK": 1024}, 4, 1, when={"width": (129, 1024)}),
    ),
)
TABLES = (GATHER_ENTRIES,)
PLANS = (LaunchPlan("gather_entries", (Step("gather_entries", ("ceil_div(longest, BLOCK_KEYS)", "sequences")),)),)


def gather_entries(
    plane: Tensor,
    tables: Tensor,
    table_rows: Tensor,
    key_starts: Tensor,
    *,
    page: int,
    keys: int,
    longest: int,
    first: int = 0,
) -> Tensor:
    """The entries of sequences from position `first` on, a new [keys, width].

    plane [slots, width]; tables int32 [S, blocks]; table_rows int32 [R]; key_starts int32 [R + 1], the last of which is
    `keys`, and `longest` the most of one sequence, both known to the host.
    """
    dims = {"width": plane.shape[1], "longest": longest, "sequences": table_rows.shape[0]}
    out = torch.empty(keys, plane.shape[1], dtype=plane.dtype, device=plane.device)
    row = require(GATHER_ENTRIES, plane, dims)
    launcher.launch(
        GATHER_ENTRIES.kernel,
        row,
        PLANS[0].steps[0].blocks(dims, row),
        {
            "cache_ptr": plane,
            "table_ptr": tables,
            "table_rows_ptr": table_rows,
            "key_starts_ptr": key_starts,
            "out_ptr": out,
            "cache_stride": plane.stride(0),
            "table_stride": tables.stride(0),
            "first": first,
            "page": page,
            "width": plane.shape[1],
        },
    )
    return out
