"""Tiles of a mask of 8 x 8 blocks: every block is in its tile's bits, and grouping never makes more tiles."""

import pytest
import torch
from deepseek_engine.kernels.tiled_mask import TiledMask, tiled_mask
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor


def blocks_of(tiled: TiledMask, shape: torch.Size) -> Tensor:
    """The mask that the tiles stand for."""
    size, per_tile = tiled.tile_rows // 8, tiled.tile_depth // 8
    columns = -(-tiled.depth // tiled.tile_depth) * per_tile
    mask = torch.zeros(tiled.groups.numel(), columns, dtype=torch.bool)
    for row in range(tiled.row_tiles):
        groups = tiled.groups[row * size : (row + 1) * size].long()
        for place in range(tiled.full.starts[row], tiled.full.starts[row + 1]):
            first = int(tiled.full.blocks[place]) * per_tile
            mask[groups, first : first + per_tile] = True
        for place in range(tiled.partial.starts[row], tiled.partial.starts[row + 1]):
            first = int(tiled.partial.blocks[place]) * per_tile
            bits = (tiled.bits[place].unsqueeze(-1) >> torch.arange(per_tile)) & 1
            assert not mask[groups, first : first + per_tile].any()
            mask[groups, first : first + per_tile] = bits.bool()
    assert not mask[:, shape[1] :].any()
    return mask[: shape[0], : shape[1]]


@given(
    rows=st.integers(1, 300),
    depth=st.integers(1, 30),
    tile=st.sampled_from([(128, 64), (64, 64), (16, 32), (64, 256)]),
    density=st.floats(0.0, 1.0),
    cluster=st.booleans(),
    seed=st.integers(0, 99),
)
def test_tiles_hold_every_block(
    rows: int, depth: int, tile: tuple[int, int], density: float, cluster: bool, seed: int
) -> None:
    mask = torch.rand(-(-rows // 8), depth, generator=torch.Generator().manual_seed(seed)) < density
    tiled = tiled_mask(mask, rows=rows, depth=depth * 8, tile_rows=tile[0], tile_depth=tile[1], cluster=cluster)
    assert torch.equal(blocks_of(tiled, mask.shape), mask)
    assert tiled.groups.sort().values.tolist()[: len(mask)] == list(range(len(mask)))
    assert (tiled.groups.sort().values[len(mask) :] == len(mask)).all()
    lengths = tiled.full.lengths + tiled.partial.lengths
    assert (lengths.diff() <= 0).all()
    assert tiled.block_density == pytest.approx(float(mask.float().mean()))
    assert tiled.tile_density == int(lengths.sum()) / (tiled.row_tiles * -(-depth * 8 // tile[1]))


@given(rows=st.integers(1, 60), columns=st.integers(1, 60), density=st.floats(0.0, 0.5), seed=st.integers(0, 99))
def test_clustering_never_makes_more_tiles(rows: int, columns: int, density: float, seed: int) -> None:
    mask = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed)) < density
    tiles = [tiled_mask(mask, rows=rows * 8, depth=columns * 8, cluster=cluster).tiles for cluster in (False, True)]
    assert tiles[1] <= tiles[0]


def test_shuffled_rows_of_a_few_patterns_are_brought_together() -> None:
    generator = torch.Generator().manual_seed(1)
    patterns = (torch.rand(4, 16, generator=generator) < 0.25).repeat_interleave(8, 1)
    mask = patterns.repeat_interleave(16, 0)[torch.randperm(64, generator=generator)]
    tiled = tiled_mask(mask, rows=512, depth=1024)
    assert tiled.tile_density == tiled.block_density
    assert tiled.partial.present == 0
    assert tiled_mask(mask, rows=512, depth=1024, cluster=False).tile_density > 1.5 * tiled.tile_density


def test_what_does_not_fit_is_refused() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="multiple of 8, not 25"):
        tiled_mask(mask, rows=16, depth=25)
    with pytest.raises(ValueError, match="tiles of 128 x 60"):
        tiled_mask(mask, rows=16, depth=24, tile_depth=60)
    for wrong in (mask[:1], mask.float()):
        with pytest.raises(ValueError, match="the mask of a 16 x 24 matrix is bool"):
            tiled_mask(wrong, rows=16, depth=24)
