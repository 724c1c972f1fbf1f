"""How the rows of a batch are grouped."""

import torch
from deepseek_engine.batch import Batch
from deepseek_engine.kernels.attention_plan import PIECE, SPLIT_TOKENS, attention_plan
from hypothesis import given, settings
from hypothesis import strategies as st

BLOCK = 16


def batch(rows: list[tuple[int, int]]) -> Batch:
    """Rows of (context before, new tokens)."""
    lengths = [context + count for context, count in rows]
    widest = -(-max(lengths) // BLOCK)
    starts = [0]
    for _, count in rows:
        starts.append(starts[-1] + count)
    tables = torch.arange(len(rows) * widest).view(len(rows), widest)
    unused = torch.zeros(starts[-1], dtype=torch.int64)
    return Batch(unused, unused, unused, starts, lengths, tables, BLOCK)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3000), st.sampled_from([1, 1, 1, 2, 300])), min_size=1, max_size=9))
def test_every_token_is_attended_to_once_and_padding_is_bounded(rows: list[tuple[int, int]]) -> None:
    plan = attention_plan(batch(rows), torch.float32)
    total = sum(count for _, count in rows)
    seen: list[int] = []
    for group in plan.groups:
        tokens = range(total) if group.tokens is None else group.tokens.tolist()
        seen.extend(tokens)
        assert group.mask.shape == (len(tokens), 1, group.length)
        assert group.slots.shape == (len(tokens) * group.length,)
        assert int(torch.isinf(group.mask).sum()) <= SPLIT_TOKENS
    for chunk in plan.chunks:
        seen.extend(range(chunk.tokens.start, chunk.tokens.stop))
        assert all(piece.mask.shape[0] <= PIECE for piece in chunk.pieces)
    assert sorted(seen) == list(range(total))


def test_padding_points_into_the_row_itself() -> None:
    plan = attention_plan(batch([(8, 1), (2, 1)]), torch.float32)
    assert plan.single is not None
    slots = plan.single.slots.view(2, 9)
    assert slots[1].tolist() == [16, 17, 18, 16, 16, 16, 16, 16, 16]
    assert torch.isinf(plan.single.mask[1, 0]).tolist() == [False] * 3 + [True] * 6


def test_a_chunk_beside_a_decoding_row() -> None:
    plan = attention_plan(batch([(8, 1), (0, 5)]), torch.float32)
    assert plan.single is None
    assert plan.groups[0].tokens is not None
    assert plan.groups[0].tokens.tolist() == [0]
    assert plan.chunks[0].tokens == slice(1, 6)
