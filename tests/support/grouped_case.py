"""Sequences of grouped heads in a paged cache, and what exact attention gives for them."""

from dataclasses import dataclass, field

import torch
from device_kernels import DEVICE, random
from torch import Tensor

SPARE_ROWS = 2
"""Rows of the block table that no sequence uses."""


@dataclass
class GroupedCase:
    """Sequences in one shuffled cache, whose unused slots and block tails hold `poison`.

    Queries, keys and values are slices of wider tensors, and a sequence's row of the block table is another's number.
    """

    lengths: list[int]
    queries: list[int]
    heads: int
    key_heads: int
    width: int
    page: int
    dtype: torch.dtype
    seed: int = 0
    poison: float = 1e4
    scale: float = 0.3
    slots: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        page, rows = self.page or 1, len(self.lengths) + SPARE_ROWS
        blocks = [-(-length // page) for length in self.lengths]
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(sum(blocks) + 2, generator=generator).tolist()
        entry = self.key_heads * self.width
        shape = (len(order) * page, entry)
        self.keys, self.values = (torch.full(shape, self.poison, dtype=self.dtype, device=DEVICE) for _ in range(2))
        tables = torch.full((rows, max(*blocks, 1) + 1), 2**20, dtype=torch.int32)
        index = torch.randperm(rows, generator=generator)[: len(blocks)]
        self.slots = []
        for number, (row, count, length) in enumerate(zip(index.tolist(), blocks, self.lengths, strict=True)):
            own = [order.pop() for _ in range(count)]
            tables[row, :count] = torch.tensor(own, dtype=torch.int32)
            self.slots.append([own[n // page] * page + n % page for n in range(length)])
            if length:
                self.keys[self.slots[-1]] = random(length, entry, dtype=self.dtype, seed=2 * number + self.seed)
                self.values[self.slots[-1]] = random(length, entry, dtype=self.dtype, seed=2 * number + 1 + self.seed)
        self.tables, self.table_rows = tables.to(DEVICE), index.to(torch.int32).to(DEVICE)
        tokens, columns = sum(self.queries), self.heads + 2 * self.key_heads
        projected = random(tokens, columns, self.width, dtype=self.dtype, seed=1, scale=self.width**-0.5)
        self.q = projected[:, : self.heads]

    @property
    def device_lengths(self) -> Tensor:
        return torch.tensor(self.lengths, dtype=torch.int32, device=DEVICE)

    @property
    def query_starts(self) -> Tensor:
        return torch.tensor([0, *self.queries]).cumsum(0).to(torch.int32).to(DEVICE)

    def exact(self, lengths: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp in float64, of the sequences' first `lengths` tokens where given."""
        outs, lses = [], []
        group = self.heads // self.key_heads
        parts = self.q.double().split(self.queries)
        for length, slots, part in zip(lengths or self.lengths, self.slots, parts, strict=True):
            keys, values = (
                plane[slots[:length]]
                .double()
                .unflatten(-1, (self.key_heads, self.width))
                .repeat_interleave(group, dim=1)
                for plane in (self.keys, self.values)
            )
            scores = torch.einsum("thd,nhd->thn", part, keys) * self.scale
            limit = torch.arange(length - part.shape[0], length, device=DEVICE)
            future = torch.arange(length, device=DEVICE) > limit[:, None, None]
            scores = scores.masked_fill(future, float("-inf"))
            lses.append(scores.logsumexp(-1))
            outs.append(torch.einsum("thn,nhd->thd", scores.softmax(-1).nan_to_num(0.0), values))
        return torch.cat(outs), torch.cat(lses)

    def move_to(self, keys: Tensor, values: Tensor) -> None:
        """Put the first sequence's pages at the end of other planes, whose rows are as wide."""
        row, blocks = int(self.table_rows[0]), -(-self.lengths[0] // self.page)
        first = keys.shape[0] // self.page - blocks
        for block, source in enumerate(self.tables[row, :blocks].tolist()):
            target = slice((first + block) * self.page, (first + block + 1) * self.page)
            for plane, own in ((keys, self.keys), (values, self.values)):
                plane[target] = own[source * self.page : (source + 1) * self.page]
            self.tables[row, block] = first + block
        self.keys, self.values = keys, values
