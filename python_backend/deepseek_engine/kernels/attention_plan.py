"""How the rows of a batch are attended to, worked out once a step and used by every layer."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from deepseek_engine.batch import Batch
from deepseek_engine.departures import Interrupt

SPLIT_TOKENS = 1024
"""Padding, in cache tokens, that costs a layer more than the operator calls of one more group (about 50 us)."""
PIECE = 256
"""Queries of a chunk that are attended to at once, which bounds the memory that masks and scores take."""


@dataclass(slots=True)
class DecodeGroup:
    """Rows of one new token each and of about the same context, padded to the longest."""

    tokens: Tensor | None
    """int64 [n]: the rows' places in the flattened batch; None when they are the whole batch in its order."""
    slots: Tensor
    """int64 [n * length]. Padding repeats the row's own first slot: what another sequence left behind, NaN even,
    cannot leak in through a weight of zero."""
    mask: Tensor
    """[n, 1, length] of the model's dtype: 0 where there is a token, -inf in the padding."""
    length: int


@dataclass(slots=True)
class Piece:
    """Some of a chunk's queries, and the keys up to the last of them."""

    queries: slice
    """Within the chunk."""
    length: int
    mask: Tensor
    """[queries, length] of the model's dtype: 0 where key position <= query position, else -inf."""


@dataclass(slots=True)
class Chunk:
    """One row of several new tokens."""

    tokens: slice
    """In the flattened batch."""
    slots: Tensor
    """int64 [context length]."""
    pieces: list[Piece]
    interrupt: Interrupt | None = None
    """The batch's."""

    def each_piece(self) -> Iterator[Piece]:
        """The pieces. Raises StepGivenUpError before one where the step is wanted no longer."""
        for piece in self.pieces:
            if self.interrupt is not None:
                self.interrupt.check()
            yield piece


@dataclass(slots=True)
class AttentionPlan:
    """Every token of the batch is in exactly one group or chunk."""

    slots: Tensor
    """int64 [T]: where the new tokens' cache entries go."""
    groups: list[DecodeGroup]
    chunks: list[Chunk]

    @property
    def single(self) -> DecodeGroup | None:
        """The group that is the whole batch, where there is one: the usual case, in which nothing is gathered."""
        return self.groups[0] if len(self.groups) == 1 and self.groups[0].tokens is None else None


def attention_plan(batch: Batch, dtype: torch.dtype) -> AttentionPlan:
    """The plan of a batch; masks are of `dtype`. Only host integers are read, so nothing waits for a device."""
    starts = batch.query_starts
    single = [row for row in range(batch.num_rows) if starts[row + 1] - starts[row] == 1]
    several = [row for row in range(batch.num_rows) if starts[row + 1] - starts[row] > 1]
    return AttentionPlan(
        slots=batch.slots,
        groups=[_decode_group(batch, rows, dtype) for rows in _similar(single, batch.context_lengths)],
        chunks=[_chunk(batch, row, dtype) for row in several],
    )


def _similar(rows: list[int], lengths: list[int]) -> list[list[int]]:
    """Split rows where padding them to one length would cost more than another group does."""
    if not rows:
        return []
    if sum(max(lengths[row] for row in rows) - lengths[row] for row in rows) <= SPLIT_TOKENS:
        return [rows]
    groups: list[list[int]] = []
    padding = 0
    for row in sorted(rows, key=lambda row: -lengths[row]):
        if groups:
            padding += lengths[groups[-1][0]] - lengths[row]
        if not groups or padding > SPLIT_TOKENS:
            groups.append([])
            padding = 0
        groups[-1].append(row)
    return groups


def _decode_group(batch: Batch, rows: list[int], dtype: torch.dtype) -> DecodeGroup:
    device = batch.block_tables.device
    lengths = [batch.context_lengths[row] for row in rows]
    longest = max(lengths)
    everything = len(rows) == batch.num_tokens
    tables = batch.block_tables if everything else batch.block_tables[rows]
    slots = _slots(tables, longest, batch.block_size)
    mask = torch.zeros(len(rows), longest, dtype=dtype, device=device)
    if min(lengths) < longest:
        padding = torch.arange(longest, device=device) >= torch.tensor(lengths, device=device).unsqueeze(-1)
        mask = mask.masked_fill_(padding, float("-inf"))
        slots = torch.where(padding, slots[:, :1], slots)
    tokens = None if everything else torch.tensor([batch.query_starts[row] for row in rows], device=device)
    return DecodeGroup(tokens=tokens, slots=slots.flatten(), mask=mask.unsqueeze(1), length=longest)


def _chunk(batch: Batch, row: int, dtype: torch.dtype) -> Chunk:
    tokens = slice(batch.query_starts[row], batch.query_starts[row + 1])
    length = batch.context_lengths[row]
    count = tokens.stop - tokens.start
    context = length - count
    slots = _slots(batch.block_tables[row : row + 1], length, batch.block_size).flatten()
    pieces = [
        _piece(slice(start, min(start + PIECE, count)), context, dtype, slots.device)
        for start in range(0, count, PIECE)
    ]
    return Chunk(tokens=tokens, slots=slots, pieces=pieces, interrupt=batch.interrupt)


def _piece(queries: slice, context: int, dtype: torch.dtype, device: torch.device) -> Piece:
    count = queries.stop - queries.start
    length = context + queries.stop
    future = torch.full((count, length), float("-inf"), dtype=dtype, device=device)
    return Piece(queries=queries, length=length, mask=future.triu(context + queries.start + 1))


def _slots(tables: Tensor, length: int, block_size: int) -> Tensor:
    """int64 [rows, length]: the cache slot of each position."""
    blocks = tables[:, : -(-length // block_size)] * block_size
    return (blocks.unsqueeze(-1) + _offsets(block_size, tables.device)).flatten(1)[:, :length]


@lru_cache(maxsize=16)
def _offsets(block_size: int, device: torch.device) -> Tensor:
    return torch.arange(block_size, device=device)
