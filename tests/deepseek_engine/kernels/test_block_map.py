"""A map of blocks says what its mask says, and takes no element twice."""

import pytest
import torch
from deepseek_engine.kernels import block_map as maps
from deepseek_engine.kernels.block_lists import SCHEDULE_WIDTH, SPARE, block_lists
from deepseek_engine.kernels.block_map import BlockMap, block_map
from deepseek_engine.kernels.block_masks import Causal, GlobalKeys, GlobalQueries, Mask, MaskFunction, Window
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

CPU = torch.device("cpu")


def elements(blocks: BlockMap) -> Tensor:
    """bool [batches, heads, queries, keys] of a map."""
    rows, columns = -(-blocks.queries // blocks.block_queries), -(-blocks.keys // blocks.block_keys)
    tiles = torch.zeros(
        blocks.batches * blocks.heads * rows, columns, blocks.block_queries, blocks.block_keys, dtype=torch.bool
    )
    bits = (blocks.patterns.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32)).bitwise_and(1).flatten(2).bool()
    for row in range(len(tiles)):
        for lists, partial in ((blocks.full, False), (blocks.partial, True)):
            for place in range(lists.starts[row], lists.starts[row + 1]):
                tile = tiles[row, lists.blocks[place]]
                assert not tile.any()
                tile[:] = bits[blocks.slots[place]] if partial else True
    tiles = tiles.view(blocks.batches, blocks.heads, rows, columns, blocks.block_queries, blocks.block_keys)
    whole = tiles.transpose(3, 4).flatten(4, 5).flatten(2, 3)
    assert not whole[..., blocks.keys :].any()
    return whole[:, :, : blocks.queries, : blocks.keys]


def expected(mask: Mask | MaskFunction, batches: int, heads: int, queries: int, keys: int) -> Tensor:
    sizes = (batches, heads, queries, keys)
    axes = [torch.arange(n).view([-1 if axis == own else 1 for axis in range(4)]) for own, n in enumerate(sizes)]
    return mask(*axes).expand(sizes)


structured = st.one_of(
    st.builds(lambda width: Window(width) & Causal(), st.integers(1, 200)),
    st.builds(
        lambda count, width: (GlobalQueries(count) | Window(width)) & Causal(3), st.integers(0, 90), st.integers(1, 60)
    ),
    st.builds(lambda count: GlobalQueries(count) | GlobalKeys(count) | Window(17, offset=5), st.integers(0, 90)),
)
arbitrary = st.builds(
    lambda factor, modulus: lambda b, h, q, k: ((q // 16) * factor + (k // 24) * 7 + h * 3 + b) % modulus < 2,
    st.integers(0, 9),
    st.integers(2, 6),
)


@given(
    mask=structured | arbitrary,
    queries=st.integers(1, 150),
    keys=st.integers(1, 150),
    block=st.sampled_from([(16, 32), (64, 64), (48, 32)]),
    maps_of=st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]),
)
def test_a_map_has_the_elements_of_its_mask(
    mask: Mask | MaskFunction, queries: int, keys: int, block: tuple[int, int], maps_of: tuple[int, int]
) -> None:
    batches, heads = maps_of
    blocks = block_map(
        mask,
        queries=queries,
        keys=keys,
        block_queries=block[0],
        block_keys=block[1],
        batches=batches,
        heads=heads,
        device=CPU,
    )
    assert torch.equal(elements(blocks), expected(mask, batches, heads, queries, keys))
    rows = blocks.schedule.view(batches * heads, -1, SCHEDULE_WIDTH)
    lengths = rows[..., 2] - rows[..., 1] + rows[..., 4] - rows[..., 3]
    assert (lengths.diff(dim=1) <= 0).all()
    assert (rows[..., 0].sort(1).values == torch.arange(rows.shape[1])).all()
    for own, scheduled in enumerate(rows):
        for number, begin, end, partial_begin, partial_end, first, partial_first, slot in scheduled.tolist():
            row = own * rows.shape[1] + number
            assert [begin, end] == blocks.full.starts[row : row + 2].tolist()
            assert [partial_begin, partial_end] == blocks.partial.starts[row : row + 2].tolist()
            assert first == blocks.full.blocks[begin]
            assert (partial_first, slot) == (blocks.partial.blocks[partial_begin], blocks.slots[partial_begin])
    # No pattern stands there twice, and none is empty or full.
    assert len(blocks.patterns.unique(dim=0)) == len(blocks.patterns)
    assert blocks.slots.shape[0] == blocks.partial.present + SPARE


def build(mask: Mask | MaskFunction, queries: int, keys: int) -> BlockMap:
    return block_map(mask, queries=queries, keys=keys, block_queries=128, block_keys=64, device=CPU)


def test_pieces_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q * k) % 97 < 50

    whole = build(mask, 300, 500)
    monkeypatch.setattr(maps, "PIECE_ELEMENTS", 3 * 128 * 64)
    pieces = build(mask, 300, 500)
    assert torch.equal(elements(whole), elements(pieces))
    assert pieces.full.blocks.tolist() == whole.full.blocks.tolist()


def test_colliding_fingerprints_lose_no_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maps, "_fingerprints", lambda bits: bits.new_zeros(len(bits), dtype=torch.int64))
    mask = Causal(11) & Window(200)
    assert torch.equal(elements(build(mask, 300, 500)), expected(mask, 1, 1, 300, 500))


@pytest.mark.parametrize("length", [32768, 65536])
def test_long_structured_contexts_are_looked_at_along_their_edges_only(length: int) -> None:
    looked = 0

    def counted(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        nonlocal looked
        looked += torch.broadcast_shapes(q.shape, k.shape).numel()
        return window(b, h, q, k)

    window = (GlobalQueries(length // 10) | Window(512)) & Causal()

    class Counted(Mask):
        def __call__(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return counted(b, h, q, k)

        bounds = staticmethod(window.bounds)

    blocks = build(Counted(), length, length)
    assert 0 < looked < 0.02 * length**2
    # The diagonal, the window's edge, and where one meets the other: the patterns do not grow with the context.
    assert blocks.patterns.shape[0] < 12
    assert blocks.full.present + blocks.partial.present < 0.06 * build(Causal(), length, length).present


def test_the_density_is_a_share_of_the_causal_triangle() -> None:
    causal = build(Causal(), 1024, 1024)
    assert causal.present == sum(2 * row + 2 for row in range(8))
    assert causal.partial.present == 16
    half = block_map(
        lambda b, h, q, k: (k <= q) & (k // 64 % 2 == h),
        queries=1024,
        keys=1024,
        block_queries=128,
        block_keys=64,
        heads=2,
        device=CPU,
    )
    assert half.density(causal) == 0.5


def test_a_mask_that_returns_numbers_is_refused() -> None:
    with pytest.raises(TypeError, match="returns bool"):
        build(lambda b, h, q, k: q - k, 10, 10)


def test_blocks_that_fill_no_words_are_refused() -> None:
    with pytest.raises(ValueError, match="blocks of 40 keys"):
        block_map(Causal(), queries=9, keys=9, block_queries=16, block_keys=40, device=CPU)


@given(rows=st.integers(0, 5), columns=st.integers(0, 9), seed=st.integers(0, 99))
def test_lists_hold_what_is_present(rows: int, columns: int, seed: int) -> None:
    present = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed)) < 0.4
    lists = block_lists(present)
    assert lists.present == present.sum()
    for row in range(rows):
        assert lists.blocks[lists.starts[row] : lists.starts[row + 1]].tolist() == present[row].nonzero()[:, 0].tolist()
    assert lists.lengths.tolist() == present.sum(1).tolist()
