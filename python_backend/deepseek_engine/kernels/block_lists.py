"""Which blocks of each row of a block matrix are present, as compressed lists (CSR)."""

from dataclasses import dataclass

import torch
from torch import Tensor

SPARE = 2
"""Entries after the last list, so that a kernel may load two steps ahead without a mask."""


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


def block_lists(present: Tensor) -> BlockLists:
    """The lists of a bool matrix [rows, blocks]."""
    starts = torch.zeros(present.shape[0] + 1, dtype=torch.int32, device=present.device)
    torch.cumsum(present.sum(1), 0, dtype=torch.int32, out=starts[1:])
    blocks = present.nonzero()[:, 1].to(torch.int32)
    return BlockLists(starts, torch.cat((blocks, blocks.new_zeros(SPARE))))
