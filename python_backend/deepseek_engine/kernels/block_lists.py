"""Which blocks of each row of a block matrix are present, as compressed lists (CSR), and the order of the work."""

from dataclasses import dataclass

import torch
from torch import Tensor

SPARE = 2
"""Entries after the last list, so that a kernel may load two steps ahead without a mask."""
SCHEDULE_WIDTH = 8
"""int32 of a row of a schedule: 32 bytes, which one access to memory brings."""


@dataclass(frozen=True, slots=True)
class BlockLists:
    """Row r has the blocks blocks[starts[r] : starts[r + 1]], ascending."""

    starts: Tensor
    """int32 [rows + 1]."""
    blocks: Tensor
    """int32 [present + SPARE], 0 in the spare entries."""

    @property
    def present(self) -> int:
        return self.blocks.shape[0] - SPARE

    @property
    def lengths(self) -> Tensor:
        """int32 [rows]."""
        return self.starts.diff()

    def to(self, device: torch.device) -> "BlockLists":
        return BlockLists(self.starts.to(device), self.blocks.to(device))


def block_lists(present: Tensor) -> BlockLists:
    """The lists of a bool matrix [rows, blocks]."""
    starts = torch.zeros(present.shape[0] + 1, dtype=torch.int32, device=present.device)
    torch.cumsum(present.sum(1), 0, dtype=torch.int32, out=starts[1:])
    blocks = present.nonzero()[:, 1].to(torch.int32)
    return BlockLists(starts, torch.cat((blocks, blocks.new_zeros(SPARE))))


def schedule(numbers: Tensor, rows: Tensor, full: BlockLists, partial: BlockLists, slots: Tensor) -> Tensor:
    """What a program needs to begin with, in one place and so without one load waiting for another.

    numbers, rows [n], in the order of work: what a program computes, and its row of the lists. slots [partial entries]:
    a number that belongs to each. Returns int32 [n, SCHEDULE_WIDTH]: number, where its full list begins and ends, where
    its partial list does, the first full block, the first partial block, and that one's slot.
    """
    columns = [numbers]
    for lists in (full, partial):
        columns += [lists.starts[rows], lists.starts[rows + 1]]
    first_full, first_partial = columns[1].long(), columns[3].long()
    columns += [full.blocks[first_full], partial.blocks[first_partial], slots[first_partial]]
    return torch.stack([column.to(torch.int32) for column in columns], dim=1)


def longest_first(lengths: Tensor) -> Tensor:
    """int64 [rows]: the rows in the order of work, the longest at the start, so that the last to end ends soon.

    Of equally long ones the later comes first, next to its neighbours, which share most of their blocks.
    """
    order = lengths.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    return lengths.shape[-1] - 1 - order
