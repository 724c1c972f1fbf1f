"""Masks of block-sparse attention: functions f(batch, head, query, key) -> whether the query sees the key.

A mask takes integer tensors that broadcast and returns bool tensors. One of known structure also bounds itself over
blocks, so that only the blocks on its edges are looked at element by element; any other callable works without.

Windows and global tokens are those of Longformer (Beltagy et al., arXiv:2004.05150) and BigBird (Zaheer et al.,
arXiv:2007.14062); blocks that are chosen by their scores from block means stand in MInference (Jiang et al.,
arXiv:2407.02490, its block-sparse heads).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Span(NamedTuple):
    """The first and the last query, or key, of blocks."""

    first: Tensor
    last: Tensor


class Bounds(NamedTuple):
    """What is known of a block without looking at its elements, bool.

    `possible`: it may have elements that are seen; `certain`: all of them are. A block is looked at where it is
    possible and not certain.
    """

    possible: Tensor
    certain: Tensor


class Mask(ABC):
    """A mask; & and | join two."""

    @abstractmethod
    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """bool of the shape that the integer arguments broadcast to."""

    def bounds(self, batch: Tensor, head: Tensor, queries: Span, keys: Span) -> Bounds:
        """Over the blocks that the arguments broadcast to. Without a better answer every block is looked at."""
        nothing = torch.zeros_like(queries.first + keys.first, dtype=torch.bool)
        return Bounds(~nothing, nothing)

    def __and__(self, other: "Mask") -> "Mask":
        return Both(self, other)

    def __or__(self, other: "Mask") -> "Mask":
        return Either(self, other)


def as_mask(mask: Mask | MaskFunction) -> Mask:
    return mask if isinstance(mask, Mask) else Function(mask)


@dataclass(frozen=True, slots=True)
class Function(Mask):
    """Any callable, of which nothing is known beforehand."""

    function: MaskFunction

    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.function(batch, head, query, key)


@dataclass(frozen=True, slots=True)
class Both(Mask):
    left: Mask
    right: Mask

    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.left(batch, head, query, key) & self.right(batch, head, query, key)

    def bounds(self, batch: Tensor, head: Tensor, queries: Span, keys: Span) -> Bounds:
        left, right = self.left.bounds(batch, head, queries, keys), self.right.bounds(batch, head, queries, keys)
        return Bounds(left.possible & right.possible, left.certain & right.certain)


@dataclass(frozen=True, slots=True)
class Either(Mask):
    left: Mask
    right: Mask

    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.left(batch, head, query, key) | self.right(batch, head, query, key)

    def bounds(self, batch: Tensor, head: Tensor, queries: Span, keys: Span) -> Bounds:
        left, right = self.left.bounds(batch, head, queries, keys), self.right.bounds(batch, head, queries, keys)
        return Bounds(left.possible | right.possible, left.certain | right.certain)


@dataclass(frozen=True, slots=True)
class Causal(Mask):
    """key <= query + offset; queries that are the last of the keys have offset keys - queries."""

    offset: int = 0

    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= query + self.offset

    def bounds(self, batch: Tensor, head: Tensor, queries: Span, keys: Span) -> Bounds:
        return Bounds(keys.first <= queries.last + self.offset, keys.last <= queries.first + self.offset)


@dataclass(frozen=True, slots=True)
class Window(Mask):
    """|query + offset - key| < width: with `Causal`, a query's own key and width - 1 before it."""

    width: int
    offset: int = 0

    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query + self.offset - key).abs() < self.width

    def bounds(self, batch: Tensor, head: Tensor, queries: Span, keys: Span) -> Bounds:
        least = queries.first + self.offset - keys.last
        most = queries.last + self.offset - keys.first
        return Bounds((least < self.width) & (most > -self.width), (least > -self.width) & (most < self.width))


@dataclass(frozen=True, slots=True)
class GlobalQueries(Mask):
    """The first `count` queries see everything."""

    count: int

    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query < self.count) & (key >= 0)

    def bounds(self, batch: Tensor, head: Tensor, queries: Span, keys: Span) -> Bounds:
        return Bounds(queries.first < self.count, queries.last < self.count)


@dataclass(frozen=True, slots=True)
class GlobalKeys(Mask):
    """Everything sees the first `count` keys."""

    count: int

    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key < self.count) & (query >= 0)

    def bounds(self, batch: Tensor, head: Tensor, queries: Span, keys: Span) -> Bounds:
        return Bounds(keys.first < self.count, keys.last < self.count)


class ChosenBlocks(Mask):
    """The queries of a block see the keys of the blocks that were chosen for it."""

    def __init__(self, chosen: Tensor, block_queries: int, block_keys: int) -> None:
        """chosen: bool [B or 1, H or 1, query blocks, key blocks], on the device where the mask is used."""
        self.chosen, self.block_queries, self.block_keys = chosen, block_queries, block_keys
        # sums[.., i, j]: how many of the first i query blocks' choices are among the first j key blocks.
        counts = chosen.cumsum(-1, dtype=torch.int32).cumsum(-2, dtype=torch.int32)
        self._sums = F.pad(counts, (1, 0, 1, 0))

    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.chosen[*self._map(batch, head), query // self.block_queries, key // self.block_keys]

    def bounds(self, batch: Tensor, head: Tensor, queries: Span, keys: Span) -> Bounds:
        place = self._map(batch, head)
        top, bottom = queries.first // self.block_queries, queries.last // self.block_queries + 1
        left, right = keys.first // self.block_keys, keys.last // self.block_keys + 1
        sums = self._sums
        found = sums[*place, bottom, right] - sums[*place, top, right]
        found = found - sums[*place, bottom, left] + sums[*place, top, left]
        return Bounds(found > 0, found == (bottom - top) * (right - left))

    def _map(self, batch: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        """A map of one batch or head serves all."""
        return batch % self.chosen.shape[0], head % self.chosen.shape[1]


def first_queries_and_window(queries: int, *, share: float = 0.1, width: int = 512) -> Mask:
    """The first `share` of the queries are global, the others see a window."""
    return GlobalQueries(ceil(share * queries)) | Window(width)


def global_tokens_and_window(tokens: int, *, width: int = 512) -> Mask:
    """The first `tokens` tokens see and are seen by all, the others see a window too."""
    return GlobalQueries(tokens) | GlobalKeys(tokens) | Window(width)


def top_blocks(
    q: Tensor, k: Tensor, count: int, *, block_queries: int, block_keys: int, k_pe: Tensor | None = None, causal: bool
) -> ChosenBlocks:
    """Each block of queries sees the `count` blocks of keys with the highest mean score q . k.

    The mean over a block of scores is the product of the mean query and the mean key. q [B, T, H, d]; k [B, S, K, d],
    or its first part where `k_pe` [B, S, rotary] is the part that heads share. Where causal the queries are the last of
    the keys, only blocks that begin no later than a block's last query are chosen, and those that hold its own queries'
    keys always, so that every query sees a key.
    """
    queries, heads = q.shape[1:3]
    keys = k.shape[1]
    if k_pe is not None:
        k = torch.cat((k, k_pe.unsqueeze(2).expand(-1, -1, k.shape[2], -1)), dim=-1)
    mean_q = _block_means(q, block_queries)
    mean_k = _block_means(k, block_keys).repeat_interleave(heads // k.shape[2], dim=1)
    scores = mean_q @ mean_k.transpose(-1, -2)
    if causal:
        first = torch.arange(mean_k.shape[2], device=q.device) * block_keys
        begin = (torch.arange(mean_q.shape[2], device=q.device) * block_queries + keys - queries).unsqueeze(-1)
        end = (begin + block_queries - 1).clamp(max=keys - 1)
        scores = scores.masked_fill(first > end, float("-inf"))
        scores = scores.masked_fill((first <= end) & (first + block_keys > begin), float("inf"))
    best = scores.topk(min(count, scores.shape[-1]), dim=-1)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best.indices, best.values > float("-inf"))
    # More of its own blocks than `count` are kept all the same.
    return ChosenBlocks(chosen | (scores == float("inf")), block_queries, block_keys)


def _block_means(x: Tensor, block: int) -> Tensor:
    """float32 [B, H, blocks, d] of x [B, T, H, d]; a last block that is not full is the mean of what it has."""
    batches, tokens, heads, width = x.shape
    padding = -tokens % block
    sums = F.pad(x.float(), (0, 0, 0, 0, 0, padding)).view(batches, -1, block, heads, width).sum(2)
    sums[:, -1:] *= block / (block - padding)
    return sums.div_(block).transpose(1, 2)
