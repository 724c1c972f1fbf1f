"""A mask evaluated to blocks before the launch: which are absent, partial and full, and the partial ones' bits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepseek_engine.kernels.block_lists import SPARE, BlockLists, block_lists, longest_first, schedule
from deepseek_engine.kernels.block_masks import Bounds, Mask, MaskFunction, Span, as_mask
from deepseek_engine.kernels.variants import ceil_div

WORD = 32
"""Bits of a word of the partial blocks."""
PIECE_ELEMENTS = 2**23
"""Elements of a mask that are looked at at once."""


@dataclass(frozen=True, slots=True)
class BlockMap:
    """The blocks of a mask over queries x keys, for `batches` x `heads` maps; one serves all where that is 1.

    Row (batch * heads + head) * query blocks + block of the lists is a query block of a map.
    """

    queries: int
    keys: int
    block_queries: int
    block_keys: int
    batches: int
    heads: int
    full: BlockLists
    """Blocks all of whose elements are seen."""
    partial: BlockLists
    """Blocks with elements that are seen and others, or keys past the last."""
    slots: Tensor
    """int32 [partial blocks + SPARE]: the pattern of each partial block, in the order of the lists."""
    patterns: Tensor
    """int32 [patterns, block_queries, block_keys / 32]: bit i of word w tells whether key 32 w + i is seen."""
    schedule: Tensor
    """int32 [maps * query blocks, SCHEDULE_WIDTH]: a map's query blocks, those with the most key blocks first."""

    @property
    def present(self) -> int:
        """Full and partial blocks of all maps."""
        return self.full.present + self.partial.present

    def density(self, whole: "BlockMap") -> float:
        """Blocks present a map, as a share of those of `whole`, such as the causal triangle's."""
        return self.present / (self.batches * self.heads) * whole.batches * whole.heads / whole.present


def block_map(
    mask: Mask | MaskFunction,
    *,
    queries: int,
    keys: int,
    block_queries: int,
    block_keys: int,
    batches: int = 1,
    heads: int = 1,
    device: torch.device,
) -> BlockMap:
    """Evaluate a mask, in pieces, on `device`.

    batches, heads: over which the mask differs; 1 where it does not. block_keys is a multiple of 32. Patterns are kept
    once however many blocks have them; a mask without any structure takes 1 bit for each element of its partial blocks.

    Raises:
        TypeError: the mask does not return bool.
        ValueError: block_keys is no multiple of 32.
    """
    if block_keys % WORD:
        raise ValueError(f"blocks of {block_keys} keys: take a multiple of {WORD}, such as a kernel's tile")
    rows, columns = ceil_div(queries, block_queries), ceil_div(keys, block_keys)
    shape = _Shape(queries, keys, block_queries, block_keys)
    judge = as_mask(mask)
    known = _bounds(judge, shape, (batches, heads, rows, columns), device)
    full = known.certain
    partial = torch.zeros_like(full)
    patterns = _Patterns(torch.empty(0, block_queries, block_keys // WORD, dtype=torch.int32, device=device))
    for places in (known.possible & ~known.certain).nonzero().split(max(1, PIECE_ELEMENTS // shape.elements)):
        seen = _evaluate(judge, places, shape)
        some, every = seen.flatten(1).any(1), seen.flatten(1).all(1)
        full[places.unbind(1)] = every
        partial[places.unbind(1)] = some & ~every
        patterns.add(_packed(seen[some & ~every]))
    slots, distinct = patterns.distinct()
    slots = torch.cat((slots, slots.new_zeros(SPARE)))
    flat = (batches * heads * rows, columns)
    lists = block_lists(full.view(flat)), block_lists(partial.view(flat))
    order = longest_first((lists[0].lengths + lists[1].lengths).view(-1, rows))
    first_rows = torch.arange(batches * heads, device=device).unsqueeze(-1) * rows
    return BlockMap(
        queries,
        keys,
        block_queries,
        block_keys,
        batches,
        heads,
        *lists,
        slots=slots,
        patterns=distinct,
        schedule=schedule(order.flatten(), (order + first_rows).flatten(), *lists, slots),
    )


@dataclass(frozen=True, slots=True)
class _Shape:
    queries: int
    keys: int
    block_queries: int
    block_keys: int

    @property
    def elements(self) -> int:
        """Of a block."""
        return self.block_queries * self.block_keys


def _bounds(mask: Mask, shape: _Shape, blocks: tuple[int, int, int, int], device: torch.device) -> Bounds:
    """bool [batches, heads, query blocks, key blocks] each; a block past the last key is not certain."""
    batch, head, row, column = (
        torch.arange(count, device=device).view([-1 if axis == own else 1 for axis in range(4)])
        for own, count in enumerate(blocks)
    )
    first_query, first_key = row * shape.block_queries, column * shape.block_keys
    after = first_key + shape.block_keys
    known = mask.bounds(
        batch,
        head,
        Span(first_query, (first_query + shape.block_queries).clamp(max=shape.queries) - 1),
        Span(first_key, after.clamp(max=shape.keys) - 1),
    )
    certain = known.certain & (after <= shape.keys)
    return Bounds(known.possible.expand(blocks), certain.expand(blocks).clone())


def _evaluate(mask: Mask, places: Tensor, shape: _Shape) -> Tensor:
    """bool [n, block_queries, block_keys] of the blocks at `places` [n, 4]. Queries past the last see what it sees."""
    batch, head, row, column = places.view(-1, 4, 1, 1).unbind(1)
    query = row * shape.block_queries + torch.arange(shape.block_queries, device=places.device).view(-1, 1)
    key = column * shape.block_keys + torch.arange(shape.block_keys, device=places.device)
    seen = mask(batch, head, query.clamp(max=shape.queries - 1), key.clamp(max=shape.keys - 1))
    if seen.dtype != torch.bool:
        raise TypeError(f"a mask returns bool, not {seen.dtype}; compare its result with something")
    return (seen & (key < shape.keys)).expand(len(places), shape.block_queries, shape.block_keys)


def _packed(seen: Tensor) -> Tensor:
    """int32 [n, queries, keys / 32] of bool [n, queries, keys]."""
    places = torch.arange(WORD, dtype=torch.int32, device=seen.device)
    words = seen.unflatten(2, (-1, WORD)).to(torch.int32) << places
    return words.sum(-1, dtype=torch.int32)


class _Patterns:
    """Collects partial blocks' bits, and keeps each pattern once."""

    def __init__(self, none: Tensor) -> None:
        self._patterns, self._slots, self._count = [none], [none.new_empty(0, dtype=torch.int32)], 0

    def add(self, bits: Tensor) -> None:
        slots, patterns = _distinct(bits)
        self._slots.append(slots + self._count)
        self._patterns.append(patterns)
        self._count += patterns.shape[0]

    def distinct(self) -> tuple[Tensor, Tensor]:
        """Each block's pattern, int32, and the patterns."""
        slots, patterns = _distinct(torch.cat(self._patterns))
        if not patterns.shape[0]:
            # The spare slots name one.
            patterns = patterns.new_zeros(1, *patterns.shape[1:])
        return slots[torch.cat(self._slots).long()], patterns


def _distinct(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's place among the distinct rows, int32 [n], and those. Where fingerprints collide all are kept."""
    _, places = _fingerprints(bits).unique(return_inverse=True)
    own = torch.arange(bits.shape[0], device=bits.device)
    count = int(places.max()) + 1 if bits.shape[0] else 0
    chosen = own.new_zeros(count).scatter_reduce_(0, places, own, "amin", include_self=False)
    if torch.equal(bits[chosen[places]], bits):
        return places.to(torch.int32), bits[chosen]
    return own.to(torch.int32), bits


def _fingerprints(bits: Tensor) -> Tensor:
    """int64 [n]: sums with random factors, which wrap around."""
    generator = torch.Generator().manual_seed(bits[0:1].numel())
    factors = torch.randint(-(2**63), 2**63 - 1, bits.shape[1:], generator=generator).to(bits.device)
    return (bits.long() * factors).flatten(1).sum(1)
