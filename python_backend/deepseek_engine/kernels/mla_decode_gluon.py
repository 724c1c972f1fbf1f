# mypy: disable-error-code="no-untyped-def"
# Device functions have no types that mypy knows.
"""Absorbed latent attention of many heads over the paged cache, with its copies and products placed by hand (sm_90).

It computes what `mla_decode_triton.mla_decode_kernel` does, from the same schedule, and is its twin for 64 rows of
queries a block, where tensor cores and not memory set the pace. What the plain language cannot say:

- the next tile of the cache is copied while this one is multiplied, with room for two tiles beside the queries;
- each of two groups of four warps makes the scores of half of a tile's entries, and half of the output's columns;
- a tile's last product runs on while the next tile's scores are begun, so that tensor cores wait for the softmax alone.

Shared memory: queries and two tiles [64, 512 + 64] and weights [64, 64] in a half type, 224 KiB. A page holds one tile.
Written in Triton's lower-level language (`triton.experimental.gluon`), which has no interpreter: tested on a card only.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
# One row of 512 elements is what two requests of a warp bring; four rows of 64 are one.
_WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))
_NARROW = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
_OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16]))
# Of [rows, 2]: a thread has what its rows of _SCORES have in both groups of warps.
_HALVES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0], [0, 1]],
        lane_bases=[[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], [0, 0]],
        block_bases=[],
        shape=[64, 2],
    )
)
_SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16))


@gluon.jit
def copy_rows(target, pointer, stride, count, LAYOUT: gl.constexpr):
    """Begin to copy the first `count` rows into shared memory; the others become zeros."""
    row = gl.arange(0, target.shape[0], gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, target.shape[1], gl.SliceLayout(0, LAYOUT))
    pointers = pointer + gl.expand_dims(row * stride, 1) + gl.expand_dims(column, 0)
    async_copy.async_copy_global_to_shared(target, pointers, mask=gl.expand_dims(row < count, 1))


@gluon.jit
def copy_tile(latents, keys, cache_ptr, page, count, RANK: gl.constexpr, ROTARY: gl.constexpr):
    """Begin to copy a page of the cache, of which `count` entries are of this sequence."""
    # A literal stride turns a tile's addresses into one base and constants.
    STRIDE: gl.constexpr = RANK + ROTARY
    entries = cache_ptr + page.to(gl.int64) * (latents.shape[0] * STRIDE)
    copy_rows(latents, entries, STRIDE, count, _WIDE)
    copy_rows(keys, entries + RANK, STRIDE, count, _NARROW)


@gluon.jit
def row_max(scores):
    """The largest of each row of _SCORES, with one barrier where `max` takes two: the groups of warps swap halves."""
    halves = gl.max(gl.reshape(scores, [scores.shape[0], 2, scores.shape[1] // 2]), axis=2)
    both = gl.max(gl.convert_layout(halves, _HALVES), axis=1)
    return gl.convert_layout(both, gl.SliceLayout(1, _SCORES), assert_trivial=True)


@gluon.jit
def mla_decode_wide_kernel(
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
    RANK: gl.constexpr,
    ROTARY: gl.constexpr,
    BLOCK_ROWS: gl.constexpr,
    TILE: gl.constexpr,
    CHAINED: gl.constexpr,
):
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    worker = gl.program_id(0)
    row_block = gl.program_id(1)
    part_rows = gl.num_programs(1) * BLOCK_ROWS
    span = gl.load(plan_ptr)
    tile = worker * span
    end = gl.minimum(tile + span, gl.load(plan_ptr + 1 + sequences))
    sequence = gl.load(plan_ptr + 2 + sequences + worker)
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    query = gl.allocate_shared_memory(DTYPE, [BLOCK_ROWS, RANK], _SHARED)
    query_pe = gl.allocate_shared_memory(DTYPE, [BLOCK_ROWS, ROTARY], _SHARED)
    latents = gl.allocate_shared_memory(DTYPE, [2, TILE, RANK], _SHARED)
    keys = gl.allocate_shared_memory(DTYPE, [2, TILE, ROTARY], _SHARED)
    weights = gl.allocate_shared_memory(DTYPE, [BLOCK_ROWS, TILE], _SHARED)
    lane = gl.arange(0, BLOCK_ROWS, gl.SliceLayout(1, _SCORES))
    place = gl.arange(0, TILE, gl.SliceLayout(0, _SCORES))
    while tile < end:
        first_tile = gl.load(plan_ptr + 1 + sequence)
        last_tile = gl.load(plan_ptr + 2 + sequence)
        stop = gl.minimum(end, last_tile)
        if stop > tile:
            length = gl.load(lengths_ptr + sequence)
            query_start = gl.load(query_starts_ptr + sequence)
            queries = gl.load(query_starts_ptr + sequence + 1) - query_start
            # Rows past the last are zeros and are not stored.
            last = queries * heads - row_block * BLOCK_ROWS - 1
            if last >= 0:
                first_row = query_start.to(gl.int64) * heads + row_block * BLOCK_ROWS
                table_row = table_ptr + gl.load(table_rows_ptr + sequence).to(gl.int64) * table_stride
                begin = tile - first_tile
                # With fixed splits there is room after a sequence's last tile.
                finish = gl.minimum(stop - first_tile, (length + TILE - 1) // TILE)
                # The products of the part before have read what is written here.
                gl.thread_barrier()
                copy_rows(query, q_ptr + first_row * q_stride, q_stride, last + 1, _WIDE)
                copy_rows(query_pe, q_pe_ptr + first_row * q_pe_stride, q_pe_stride, last + 1, _NARROW)
                cached = gl.minimum(length, finish * TILE)
                page = gl.load(table_row + begin, mask=begin < finish, other=0)
                copy_tile(latents.index(0), keys.index(0), cache_ptr, page, cached - begin * TILE, RANK, ROTARY)
                async_copy.commit_group()
                page = gl.load(table_row + begin + 1, mask=begin + 1 < finish, other=0)
                copy_tile(latents.index(1), keys.index(1), cache_ptr, page, cached - (begin + 1) * TILE, RANK, ROTARY)
                async_copy.commit_group()
                page = gl.load(table_row + begin + 2, mask=begin + 2 < finish, other=0)
                visible = length - queries + (row_block * BLOCK_ROWS + gl.minimum(lane, last)) // heads + 1
                peak = gl.full([BLOCK_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, _SCORES))
                weight = gl.zeros([BLOCK_ROWS, TILE], gl.float32, _SCORES)
                acc = gl.zeros([BLOCK_ROWS, RANK], gl.float32, _OUTPUT)
                async_copy.wait_group(1)
                gl.thread_barrier()
                s = gl.zeros([BLOCK_ROWS, TILE], gl.float32, _SCORES)
                s = hopper.warpgroup_mma(query, latents.index(0).permute((1, 0)), s, is_async=True)
                s = hopper.warpgroup_mma(query_pe, keys.index(0).permute((1, 0)), s, is_async=True)
                s = hopper.warpgroup_mma_wait(0, deps=[s])
                # No product is under way where the loop begins again: the assembler would have each wait for itself.
                for j in range(begin, finish):
                    slot = (j - begin) & 1
                    s = s * (scale * LOG2_E)
                    position = j * TILE + place
                    s = gl.where(gl.expand_dims(position, 0) < gl.expand_dims(visible, 1), s, float("-inf"))
                    new_peak = gl.maximum(peak, row_max(s))
                    # Where nothing has been visible yet the peak is -inf, and -inf less -inf is no number.
                    shift = gl.where(new_peak == float("-inf"), 0.0, new_peak)
                    p = gl.exp2(s - gl.expand_dims(shift, 1))
                    fade = gl.exp2(peak - shift)
                    peak = new_peak
                    # Summed up over a row at the end alone.
                    weight = weight * gl.expand_dims(fade, 1) + p
                    weights.store(p.to(DTYPE))
                    acc = acc * gl.expand_dims(gl.convert_layout(fade, gl.SliceLayout(1, _OUTPUT)), 1)
                    hopper.fence_async_shared()
                    async_copy.wait_group(0)
                    # Next to the wait, or the compiler adds one of its own.
                    gl.thread_barrier()
                    acc = hopper.warpgroup_mma(weights, latents.index(slot), acc, is_async=True)
                    # After the last tile these are scores of zeros, for nothing.
                    s = gl.zeros([BLOCK_ROWS, TILE], gl.float32, _SCORES)
                    s = hopper.warpgroup_mma(query, latents.index(1 - slot).permute((1, 0)), s, is_async=True)
                    s = hopper.warpgroup_mma(query_pe, keys.index(1 - slot).permute((1, 0)), s, is_async=True)
                    # All but the scores' two products; then the tile's room is for the one after the next.
                    acc = hopper.warpgroup_mma_wait(2, deps=[acc])
                    gl.thread_barrier()
                    left = cached - (j + 2) * TILE
                    copy_tile(latents.index(slot), keys.index(slot), cache_ptr, page, left, RANK, ROTARY)
                    async_copy.commit_group()
                    page = gl.load(table_row + j + 3, mask=j + 3 < finish, other=0)
                    s = hopper.warpgroup_mma_wait(0, deps=[s])
                async_copy.wait_group(0)
                total = gl.sum(weight, axis=1)
                empty = total == 0.0
                inverse = gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, total))
                lse = gl.where(empty, float("-inf"), (peak + gl.log2(gl.where(empty, 1.0, total))) * LN_2)
                result = acc * gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, _OUTPUT)), 1)
                row = gl.expand_dims(gl.arange(0, BLOCK_ROWS, gl.SliceLayout(1, _OUTPUT)), 1)
                offsets = row * RANK + gl.expand_dims(gl.arange(0, RANK, gl.SliceLayout(0, _OUTPUT)), 0)
                if (tile == first_tile) & (stop == last_tile):
                    gl.store(lse_ptr + first_row + lane, lse, mask=lane <= last)
                    gl.store(out_ptr + first_row * RANK + offsets, result.to(DTYPE), mask=row <= last)
                else:
                    first_part = (worker + sequence).to(gl.int64) * part_rows + row_block * BLOCK_ROWS
                    gl.store(part_lse_ptr + first_part + lane, lse, mask=lane <= last)
                    gl.store(part_ptr + first_part * RANK + offsets, result, mask=row <= last)
            tile = stop
        sequence += 1
