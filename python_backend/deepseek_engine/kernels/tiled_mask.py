"""Groups the 8 x 8 blocks of a sparse matrix to tiles that fill a tensor core."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deepseek_engine.kernels.block_lists import SPARE, BlockLists, block_lists, longest_first, schedule
from deepseek_engine.kernels.block_sparse_gemm import SIDE
from deepseek_engine.kernels.variants import ceil_div


@dataclass(frozen=True, slots=True)
class TiledMask:
    """The tiles of a mask of 8 x 8 blocks over a matrix [rows, depth]. Tile rows come with the most tiles first."""

    rows: int
    depth: int
    tile_rows: int
    tile_depth: int
    groups: Tensor
    """int32 [tile rows * tile_rows / 8]: the matrix's groups of eight rows in the order of the tile rows. Padding names
    a group past the last."""
    full: BlockLists
    """A tile row's tiles whose blocks are all present."""
    partial: BlockLists
    """Its tiles with some."""
    bits: Tensor
    """int32 [partial tiles + SPARE, tile_rows / 8]: bit i tells whether a group's i-th block of the tile is present."""
    schedule: Tensor
    """int32 [tile rows, SCHEDULE_WIDTH]; a partial tile's slot is its place in the list."""
    block_density: float
    """Of the 8 x 8 blocks, the share that is present."""

    @property
    def row_tiles(self) -> int:
        return self.full.starts.shape[0] - 1

    @property
    def tiles(self) -> int:
        """Present ones."""
        return self.full.present + self.partial.present

    @property
    def tile_density(self) -> float:
        """Of the tiles, the share that is present: what the product's time goes by."""
        return self.tiles / max(1, self.row_tiles * ceil_div(self.depth, self.tile_depth))


def tiled_mask(
    mask: Tensor, *, rows: int, depth: int, tile_rows: int = 128, tile_depth: int = 64, cluster: bool = True
) -> TiledMask:
    """Tiles of a mask, bool [ceil(rows / 8), depth / 8].

    cluster: rows of blocks with similar patterns are brought together where that makes fewer tiles; the product's rows
    are put back into place by the kernel. Worked out on the host in O((rows / 8)^2 depth / tile_depth).

    Raises:
        ValueError: the depth is no multiple of 8, a tile's sides are no multiples of 8, or its depth is over 256, or
            the mask has another shape.
    """
    _check(mask, rows, depth, tile_rows, tile_depth)
    blocks = mask.cpu()
    per_tile, size = tile_depth // SIDE, tile_rows // SIDE
    count = blocks.shape[0]
    padded = F.pad(blocks, (0, -blocks.shape[1] % per_tile)).view(count, -1, per_tile)
    groups = _grouped(padded.any(-1), size) if cluster else torch.arange(count)
    missing = -count % size
    real = F.pad(torch.ones(count, dtype=torch.bool), (0, missing)).view(-1, size)
    groups = F.pad(groups, (0, missing), value=count).view(-1, size)
    # Blocks of a tile row: [tile rows, groups, tiles, blocks of a group]; padding rows copy a real one.
    tiles = padded[groups.clamp(max=max(count - 1, 0))]
    seen = tiles & real[..., None, None]
    some = seen.any(3).any(1)
    every = (tiles | ~real[..., None, None]).all(3).all(1)
    order = longest_first(some.sum(1))
    some, every, seen, groups = some[order], every[order], seen[order], groups[order]
    partial = some & ~every
    words = (seen.to(torch.int32) << torch.arange(per_tile, dtype=torch.int32)).sum(-1, dtype=torch.int32)
    bits = F.pad(words.transpose(1, 2)[partial], (0, 0, 0, SPARE))
    lists = block_lists(some & every), block_lists(partial)
    place = torch.arange(len(lists[1].blocks))
    row = torch.arange(len(some))
    device = mask.device
    return TiledMask(
        rows,
        depth,
        tile_rows,
        tile_depth,
        groups=groups.flatten().to(torch.int32).to(device),
        full=lists[0].to(device),
        partial=lists[1].to(device),
        bits=bits.to(device),
        schedule=schedule(row, row, *lists, place).to(device),
        block_density=float(blocks.float().mean()) if blocks.numel() else 0.0,
    )


def _check(mask: Tensor, rows: int, depth: int, tile_rows: int, tile_depth: int) -> None:
    if depth % SIDE:
        raise ValueError(f"a block-sparse matrix has a depth that is a multiple of {SIDE}, not {depth}; pad it")
    if tile_rows % SIDE or tile_depth % SIDE or tile_depth > 32 * SIDE:
        raise ValueError(f"tiles of {tile_rows} x {tile_depth}: sides are multiples of {SIDE}, depth at most 256")
    expected = (ceil_div(rows, SIDE), depth // SIDE)
    if mask.dtype != torch.bool or mask.shape != expected:
        raise ValueError(f"the mask of a {rows} x {depth} matrix is bool {expected}, not {mask.dtype} {mask.shape}")


def _grouped(present: Tensor, size: int) -> Tensor:
    """An order of the rows of bool [groups, tiles] in which `size` neighbours have few tiles between them."""
    plain = torch.arange(present.shape[0])
    orders = (plain, _greedy(present, size))
    return min(orders, key=lambda order: _union_tiles(present[order], size))


def _greedy(present: Tensor, size: int) -> Tensor:
    """The widest row left begins a set; those that add the fewest tiles to it, and share the most, join."""
    count, tiles = present.shape
    wide = present.float()
    lengths = wide.sum(1)
    left = torch.ones(count, dtype=torch.bool)
    order = []
    union = torch.zeros(tiles)
    for place in range(count):
        if place % size == 0:
            union = torch.zeros(tiles)
            cost = -lengths
        else:
            shared = wide @ union
            cost = (lengths - shared) * (tiles + 1) - shared
        chosen = int(cost.masked_fill(~left, float("inf")).argmin())
        order.append(chosen)
        left[chosen] = False
        union = torch.maximum(union, wide[chosen])
    return torch.tensor(order, dtype=torch.int64)


def _union_tiles(present: Tensor, size: int) -> int:
    padded = F.pad(present, (0, 0, 0, -present.shape[0] % size))
    return int(padded.view(-1, size, present.shape[1]).any(1).sum())
