"""Cuts the long rows of a step into groups that are attended to together."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepseek_engine.gpu.device_step import PrefillChunk, PrefillGroup
from deepseek_engine.gpu.seats import Seats
from deepseek_engine.step_plan import StepRow

EXPANDED_TOKENS = 32768
"""Context tokens whose keys and values are expanded at once: what that takes is kept free (`memory_profile`)."""


@dataclass(frozen=True, slots=True)
class LongRow:
    """A row of several new tokens."""

    row: StepRow
    first_token: int
    """In the flattened batch."""
    seat: int
    """Its sequence's row of the block tables."""

    @property
    def count(self) -> int:
        return len(self.row.token_ids)

    @property
    def context(self) -> int:
        """Tokens in the cache once the row has run."""
        return self.row.start + self.count


def prefill_groups(
    rows: Sequence[LongRow], seats: Seats, device: torch.device, limit: int | None = EXPANDED_TOKENS
) -> list[PrefillGroup]:
    """Groups of neighbouring rows with at most `limit` keys each; a longer row is a group of its own, in chunks.

    Without a limit nothing is expanded: the rows are one group, which has no chunks.
    """
    if limit is None:
        return [_group(rows, [], device)] if rows else []
    groups: list[PrefillGroup] = []
    together: list[LongRow] = []
    for row in rows:
        if together and sum(other.context for other in together) + row.context > limit:
            groups.append(_together(together, seats, device))
            together = []
        if row.context > limit:
            groups.append(_alone(row, seats, device, limit))
        else:
            together.append(row)
    if together:
        groups.append(_together(together, seats, device))
    return groups


def _together(rows: list[LongRow], seats: Seats, device: torch.device) -> PrefillGroup:
    slots = np.concatenate([seats.slots(row.row, row.context) for row in rows])
    chunk = PrefillChunk(
        slots=torch.from_numpy(slots).to(device, non_blocking=True),
        key_starts=_starts([row.context for row in rows], device),
        causal=True,
    )
    return _group(rows, [chunk], device)


def _alone(row: LongRow, seats: Seats, device: torch.device, limit: int) -> PrefillGroup:
    slots = torch.from_numpy(seats.slots(row.row, row.context)).to(device, non_blocking=True)
    # Every query sees the older keys whole, so only the newest chunk, which holds the row's own, is causal.
    newest = max(limit, row.count)
    bounds = [*range(0, row.context - newest, limit), row.context - newest]
    chunks = [PrefillChunk(slots[row.context - newest :], _starts([newest], device), causal=True)]
    for begin, end in pairwise(bounds):
        chunks.append(PrefillChunk(slots[begin:end], _starts([end - begin], device), causal=False))
    return _group([row], chunks, device)


def _group(rows: Sequence[LongRow], chunks: list[PrefillChunk], device: torch.device) -> PrefillGroup:
    counts = [row.count for row in rows]
    first, size = rows[0].first_token, len(rows)
    # One copy brings all three.
    numbers = np.concatenate((_cumulated(counts), [row.context for row in rows], [row.seat for row in rows]))
    starts, lengths, table_rows = _sent(numbers, device).split((size + 1, size, size))
    return PrefillGroup(
        tokens=slice(first, first + sum(counts)),
        query_starts=starts,
        lengths=lengths,
        table_rows=table_rows,
        longest=max(counts),
        chunks=chunks,
    )


def _starts(counts: list[int], device: torch.device) -> Tensor:
    return _sent(_cumulated(counts), device)


def _cumulated(counts: list[int]) -> npt.NDArray[np.int64]:
    return np.cumsum([0, *counts])


def _sent(numbers: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    """int32, on the device."""
    return torch.from_numpy(numbers.astype(np.int32)).to(device, non_blocking=True)
