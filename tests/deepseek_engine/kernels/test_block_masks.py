"""Masks over blocks: what is known of a block without looking agrees with its elements."""

import pytest
import torch
from deepseek_engine.kernels import block_masks as masks
from deepseek_engine.kernels.block_masks import Mask, Span
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

QUERIES, KEYS = 23, 29


def axes(batches: int, heads: int, queries: int, keys: int) -> list[Tensor]:
    sizes = (batches, heads, queries, keys)
    return [torch.arange(n).view([-1 if axis == own else 1 for axis in range(4)]) for own, n in enumerate(sizes)]


def chosen(seed: int, block_queries: int, block_keys: int) -> masks.ChosenBlocks:
    generator = torch.Generator().manual_seed(seed)
    rows, columns = -(-QUERIES // block_queries), -(-KEYS // block_keys)
    return masks.ChosenBlocks(torch.rand(2, 3, rows, columns, generator=generator) < 0.5, block_queries, block_keys)


offsets = st.integers(-9, 9)
leaves = st.one_of(
    st.builds(masks.Causal, offsets),
    st.builds(masks.Window, st.integers(1, 20), offsets),
    st.builds(masks.GlobalQueries, st.integers(0, QUERIES)),
    st.builds(masks.GlobalKeys, st.integers(0, KEYS)),
    st.builds(chosen, st.integers(0, 99), st.integers(1, 9), st.integers(1, 9)),
    st.builds(lambda modulus: masks.as_mask(lambda b, h, q, k: (q + k + h) % modulus == 0), st.integers(1, 4)),
)
trees = st.recursive(
    leaves,
    lambda inner: st.builds(lambda a, b, both: a & b if both else a | b, inner, inner, st.booleans()),
    max_leaves=4,
)


@given(mask=trees, block_queries=st.integers(1, 12), block_keys=st.integers(1, 12))
def test_bounds_hold_for_every_element(mask: Mask, block_queries: int, block_keys: int) -> None:
    seen = mask(*axes(2, 3, QUERIES, KEYS)).expand(2, 3, QUERIES, KEYS)
    rows, columns = -(-QUERIES // block_queries), -(-KEYS // block_keys)
    batch, head, row, column = axes(2, 3, rows, columns)
    spans = [
        Span(number * size, ((number + 1) * size).clamp(max=limit) - 1)
        for number, size, limit in ((row, block_queries, QUERIES), (column, block_keys, KEYS))
    ]
    possible, certain = (known.expand(2, 3, rows, columns) for known in mask.bounds(batch, head, *spans))
    for i in range(rows):
        for j in range(columns):
            block = seen[:, :, i * block_queries : (i + 1) * block_queries, j * block_keys : (j + 1) * block_keys]
            assert (block.flatten(2).all(2) | ~certain[:, :, i, j]).all()
            assert (possible[:, :, i, j] | ~block.flatten(2).any(2)).all()


def test_a_causal_window_is_the_keys_before_a_query() -> None:
    seen = (masks.Window(3) & masks.Causal())(*axes(1, 1, 6, 6))[0, 0]
    assert torch.equal(seen, torch.ones(6, 6).tril().triu(-2).bool())


def test_queries_that_are_the_last_of_the_keys() -> None:
    seen = masks.Causal(offset=2)(*axes(1, 1, 3, 5))[0, 0]
    assert torch.equal(seen, torch.ones(3, 5).tril(2).bool())


def test_global_queries_and_tokens() -> None:
    rows = masks.first_queries_and_window(20, share=0.1, width=2)(*axes(1, 1, 20, 20))[0, 0]
    assert rows.sum(1).tolist() == [20] * 2 + [3] * 17 + [2]
    both = masks.global_tokens_and_window(2, width=2)(*axes(1, 1, 20, 20))[0, 0]
    assert both[:, :2].all()
    assert both[:2].all()
    assert both[10].sum() == 5


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
def test_the_top_blocks_have_the_highest_mean_scores(causal: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(2, 21, heads, 5, generator=generator) for heads in (4, 2))
    mask = masks.top_blocks(q, k, 3, block_queries=8, block_keys=4, causal=causal)
    scores = torch.einsum("bthd,bnhd->bhtn", q, k.repeat_interleave(2, dim=2))
    for row in range(3):
        means = torch.stack([scores[:, :, row * 8 : row * 8 + 8, c * 4 : c * 4 + 4].mean((2, 3)) for c in range(6)], -1)
        own = range(row * 2, min(row * 2 + 2, 6))
        if causal:
            means[..., own[-1] + 1 :] = float("-inf")
            means[..., own[0] : own[-1] + 1] = float("inf")
        best = torch.zeros_like(means, dtype=torch.bool).scatter_(-1, means.topk(3, -1).indices, True)
        assert torch.equal(mask.chosen[:, :, row], best & (means > float("-inf")))


def test_the_second_part_of_a_key_counts() -> None:
    q, k, k_pe = torch.randn(1, 16, 2, 12), torch.randn(1, 16, 2, 8), torch.randn(1, 16, 4)
    whole = torch.cat((k, k_pe.unsqueeze(2).expand(-1, -1, 2, -1)), dim=-1)
    options = {"block_queries": 4, "block_keys": 2, "causal": True}
    parts = masks.top_blocks(q, k, 4, k_pe=k_pe, **options)
    assert torch.equal(parts.chosen, masks.top_blocks(q, whole, 4, **options).chosen)
