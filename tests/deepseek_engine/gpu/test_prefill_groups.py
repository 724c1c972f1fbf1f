"""Every new token sees every key up to itself exactly once, however the rows are grouped and cut."""

from itertools import pairwise

import pytest
import torch
from deepseek_engine.gpu.prefill_groups import LongRow, prefill_groups
from deepseek_engine.gpu.seats import Seats
from deepseek_engine.step_plan import StepRow
from hypothesis import example, given
from hypothesis import strategies as st

BLOCK_SIZE, BLOCKS = 16, 20
SEATS = Seats(8, BLOCKS, BLOCK_SIZE)
CPU = torch.device("cpu")
ROWS = st.lists(st.tuples(st.integers(0, 150), st.integers(2, 150)), min_size=1, max_size=6)
LIMIT = st.integers(1, 400)


def long_rows(shapes, first=0):
    """Rows of (cached, new) tokens whose tables are their own."""
    rows = []
    for place, (start, count) in enumerate(shapes):
        table = [place * 100 + (block * 7) % BLOCKS for block in range(-(-(start + count) // BLOCK_SIZE))]
        rows.append(LongRow(StepRow(place, [0] * count, start, table, sample=True), first, place))
        first += count
    return rows


def seen(groups):
    """Of each token of the batch the slots that it sees, in the order of the chunks."""
    found: dict[int, list[int]] = {}
    for group in groups:
        queries = group.query_starts.tolist()
        assert queries[0] == 0
        assert queries[-1] == group.tokens.stop - group.tokens.start
        assert group.longest == max(stop - start for start, stop in pairwise(queries))
        for chunk in group.chunks:
            keys = chunk.key_starts.tolist()
            assert (keys[0], keys[-1], len(keys)) == (0, len(chunk.slots), len(queries))
            for (query, query_stop), (key, key_stop) in zip(pairwise(queries), pairwise(keys), strict=True):
                for token in range(query, query_stop):
                    # A causal chunk's keys end with the row's own, so its last query sees all of them.
                    stop = key_stop - (query_stop - 1 - token) if chunk.causal else key_stop
                    found.setdefault(group.tokens.start + token, []).extend(chunk.slots[key:stop].tolist())
    return found


@given(ROWS, LIMIT, st.integers(0, 5))
@example([(0, 150)], 40, 0)
@example([(150, 2)], 150, 3)
@example([(150, 150)], 1, 0)
def test_every_token_sees_every_key_up_to_itself_once(shapes, limit, first):
    rows = long_rows(shapes, first)
    found = seen(prefill_groups(rows, SEATS, CPU, limit))
    assert sorted(found) == list(range(first, first + sum(count for _, count in shapes)))
    for row in rows:
        slots = SEATS.slots(row.row, row.context).tolist()
        for token in range(row.count):
            assert sorted(found[row.first_token + token]) == sorted(slots[: row.row.start + token + 1])


@given(ROWS, LIMIT)
def test_no_more_is_expanded_at_once_than_the_limit_or_a_rows_own_tokens(shapes, limit):
    for group in prefill_groups(long_rows(shapes), SEATS, CPU, limit):
        for chunk in group.chunks:
            assert len(chunk.slots) <= max(limit, group.longest if chunk.causal else 0)


@given(ROWS, LIMIT)
def test_the_causal_chunk_is_the_first_and_the_only_one(shapes, limit):
    for group in prefill_groups(long_rows(shapes), SEATS, CPU, limit):
        assert [chunk.causal for chunk in group.chunks] == [True] + [False] * (len(group.chunks) - 1)


@given(ROWS, LIMIT)
def test_neighbours_that_fit_are_together(shapes, limit):
    groups = prefill_groups(long_rows(shapes), SEATS, CPU, limit)
    sizes = [sum(len(chunk.slots) for chunk in group.chunks) for group in groups]
    assert all(one + other > limit for one, other in pairwise(sizes))


def test_numbers_have_the_dtypes_that_kernels_take():
    (group,) = prefill_groups(long_rows([(3, 20), (40, 5)]), SEATS, CPU)
    assert (group.query_starts.dtype, group.chunks[0].key_starts.dtype) == (torch.int32, torch.int32)
    assert group.chunks[0].slots.dtype == torch.int64
    assert group.tokens == slice(0, 25)
    assert group.query_starts.tolist() == [0, 20, 25]
    assert group.chunks[0].key_starts.tolist() == [0, 23, 68]


def test_no_rows_make_no_groups():
    assert prefill_groups([], SEATS, CPU) == []
    assert prefill_groups([], SEATS, CPU, None) == []


@given(ROWS, st.integers(0, 5))
def test_rows_that_attend_to_the_cache_itself_are_one_group(shapes, first):
    (group,) = prefill_groups(long_rows(shapes, first), SEATS, CPU, None)
    assert group.chunks == []
    assert group.tokens == slice(first, first + sum(count for _, count in shapes))
    assert [stop - start for start, stop in pairwise(group.query_starts.tolist())] == [count for _, count in shapes]
    assert group.lengths.tolist() == [start + count for start, count in shapes]
    assert group.table_rows.tolist() == list(range(len(shapes)))
    assert {group.query_starts.dtype, group.lengths.dtype, group.table_rows.dtype} == {torch.int32}


@pytest.mark.parametrize(("context", "chunks"), [(100, 1), (101, 2), (200, 2), (201, 3)])
def test_a_long_context_is_cut_from_its_end(context, chunks):
    (group,) = prefill_groups(long_rows([(context - 2, 2)]), SEATS, CPU, limit=100)
    assert len(group.chunks[0].slots) == min(context, 100)
    assert len(group.chunks) == chunks
