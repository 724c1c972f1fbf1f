"""What a step reads on the device, filled on the host: tokens, sequences, rows that draw, and changes of the tables."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepseek_engine.gpu.device_step import DeviceStep
from deepseek_engine.gpu.packed_inputs import PackedInputs
from deepseek_engine.gpu.prefill_groups import LongRow, prefill_groups
from deepseek_engine.gpu.sampling_seats import COLUMNS, SamplingSeats
from deepseek_engine.gpu.seats import Seats
from deepseek_engine.kernels.sampling_triton import SamplingRows
from deepseek_engine.kernels.step_inputs_triton import apply_edits
from deepseek_engine.step_plan import LAST_SAMPLED, StepRow

EDITS = 512
"""Entries of block tables that a captured step changes."""
_PADDING = ("slots", "sources", "edit_places", "draws", "penalty_rows", "mask_rows")
"""Fields whose padding is -1."""


class StepInputs:
    """The inputs of one step after another, in tensors that stay where they are.

    A step is filled between `begin` and `send`; what is not filled holds older numbers.

    Args:
        tokens: tokens of a step that is filled with `fill_decodes` or `fill_short`, at most.
        rows: sequences of a step at most.
        context: tokens of a sequence at most.
        block_size: tokens a block.
        sampling: what the draws depend on.
        device: where steps run.
    """

    def __init__(
        self, *, tokens: int, rows: int, context: int, block_size: int, sampling: SamplingSeats, device: torch.device
    ) -> None:
        self._rows = rows
        self._block_size = block_size
        self._sampling = sampling
        self._device = device
        # A row's own table has to fit a step, and one block more where a token is under way.
        self._seats = Seats(rows, -(-context // block_size) + 1, block_size)
        self._tables = torch.zeros(rows, self._seats.blocks, dtype=torch.int32, device=device)
        # The last place is nobody's: rows that draw nothing write there.
        self._last_tokens = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self._packed = PackedInputs(_fields(tokens, rows), device)
        self._arrays: dict[str, npt.NDArray[Any]] = {}

    def release(self, sequence_id: int) -> None:
        """Forget a sequence; unknown ones are ignored."""
        self._seats.release(sequence_id)

    def forget(self) -> None:
        """Forget every sequence, and what was sent of their tables."""
        self._seats = Seats(self._rows, self._seats.blocks, self._block_size)

    # On the host.

    def begin(self) -> None:
        """Begin the next step; waits for the device where it still reads the numbers of three steps ago."""
        self._arrays = self._packed.begin()

    def fill_decodes(self, rows: list[StepRow], size: int) -> None:
        """Rows of one token each, padded to `size`, which all may draw."""
        count, arrays = len(rows), self._arrays
        seats = self._place(rows)
        self._fill_tokens(rows, seats, size)
        arrays["lengths"][:count] = arrays["positions"][:count] + 1
        arrays["lengths"][count:size] = 0
        arrays["query_starts"][: count + 1] = np.arange(count + 1)
        arrays["query_starts"][count + 1 : size + 1] = count
        arrays["table_rows"][:count] = seats
        self._fill_draws(rows, seats, size)

    def fill_short(self, rows: list[StepRow], size: int, queries: int) -> None:
        """Rows of few tokens, padded to `size`, as decoded sequences of `queries` each."""
        seats, arrays = self._place(rows), self._arrays
        self._fill_tokens(rows, seats, size)
        starts, lengths, tables = [0], [], []
        for row, seat in zip(rows, seats, strict=True):
            count = len(row.token_ids)
            for first in range(0, count, queries):
                stop = min(first + queries, count)
                starts.append(starts[-1] + stop - first)
                lengths.append(row.start + stop)
                tables.append(seat)
        count = len(lengths)
        arrays["query_starts"][: count + 1] = starts
        arrays["query_starts"][count + 1 : size + 1] = starts[-1]
        arrays["lengths"][:count] = lengths
        arrays["lengths"][count:size] = 0
        arrays["table_rows"][:count] = tables
        arrays["table_rows"][count:size] = 0

    def fill_long(self, rows: list[StepRow], limit: int | None) -> DeviceStep:
        """Any rows, those of one token first, as a step of its own tensors.

        `limit`: context tokens that are expanded at once; None where keys are read from the cache.
        """
        seats, arrays = self._place(rows), self._arrays
        tokens, sources, positions, slots = self._numbers(rows, seats)
        numbers = torch.tensor((tokens, positions, slots), dtype=torch.int64).to(self._device, non_blocking=True)
        decoded = sum(len(row.token_ids) == 1 for row in rows)
        arrays["lengths"][:decoded] = [row.start + 1 for row in rows[:decoded]]
        arrays["query_starts"][: decoded + 1] = np.arange(decoded + 1)
        arrays["table_rows"][:decoded] = seats[:decoded]
        long_rows = []
        first = decoded
        for row, seat in zip(rows[decoded:], seats[decoded:], strict=True):
            long_rows.append(LongRow(row, first, seat))
            first += len(row.token_ids)
        inputs = self._packed.tensors
        return DeviceStep(
            token_ids=numbers[0],
            sources=torch.tensor(sources, dtype=torch.int32).to(self._device, non_blocking=True),
            last_tokens=self._last_tokens,
            positions=numbers[1],
            slots=numbers[2],
            lengths=inputs["lengths"][:decoded],
            query_starts=inputs["query_starts"][: decoded + 1],
            table_rows=inputs["table_rows"][:decoded],
            tables=self._tables,
            block_size=self._block_size,
            max_queries=1,
            num_decoded=decoded,
            prefill=prefill_groups(long_rows, self._seats, self._device, limit),
        )

    def fill_whole(self, rows: list[StepRow]) -> DeviceStep:
        """Any rows, each as one sequence, as a step of its own tensors."""
        seats = self._place(rows)
        tokens, sources, positions, slots = self._numbers(rows, seats)
        numbers = torch.tensor((tokens, positions, slots), dtype=torch.int64).to(self._device, non_blocking=True)
        counts = [len(row.token_ids) for row in rows]
        lengths = [row.start + count for row, count in zip(rows, counts, strict=True)]
        starts: list[int] = [0, *np.cumsum(counts).tolist()]
        sources_sent, lengths_sent, starts_sent, seats_sent = _sent(self._device, sources, lengths, starts, seats)
        return DeviceStep(
            token_ids=numbers[0],
            sources=sources_sent,
            last_tokens=self._last_tokens,
            positions=numbers[1],
            slots=numbers[2],
            lengths=lengths_sent,
            query_starts=starts_sent,
            table_rows=seats_sent,
            tables=self._tables,
            block_size=self._block_size,
            max_queries=max(counts),
            num_decoded=len(tokens),
            host_rows=torch.tensor([counts, lengths], dtype=torch.int32).t().contiguous(),
        )

    def fill_head(self, rows: list[StepRow], size: int) -> None:
        """The rows that draw after `fill_short` or `fill_long`, padded to `size`."""
        self._fill_draws(rows, [self._seats.seat_of(row.sequence_id) for row in rows], size)

    def fill_nothing(self) -> None:
        """Padded rows alone."""
        for name, array in self._arrays.items():
            array[:] = -1 if name in _PADDING else 0
        self._arrays["seats"][:] = self._rows

    def send(self) -> None:
        """Send what was filled. Changes of the tables that do not fit beside it go first, on their own."""
        places, values = self._seats.edits()
        if len(places) > EDITS:
            numbers = torch.tensor((places, values), dtype=torch.int32).to(self._device, non_blocking=True)
            apply_edits(self._tables, numbers[0], numbers[1])
            places, values = [], []
        count, arrays = len(places), self._arrays
        arrays["edit_places"][:count] = places
        arrays["edit_places"][count:] = -1
        arrays["edit_values"][:count] = values
        self._packed.send()

    # On the device; graphs capture these.

    def apply_edits(self) -> None:
        """Bring the tables up to date."""
        inputs = self._packed.tensors
        apply_edits(self._tables, inputs["edit_places"], inputs["edit_values"])

    def step(self, size: int, queries: int) -> DeviceStep:
        """The step that `fill_decodes` or `fill_short` has filled."""
        inputs = self._packed.tensors
        return DeviceStep(
            token_ids=inputs["token_ids"][:size],
            sources=inputs["sources"][:size],
            last_tokens=self._last_tokens,
            positions=inputs["positions"][:size],
            slots=inputs["slots"][:size],
            lengths=inputs["lengths"][:size],
            query_starts=inputs["query_starts"][: size + 1],
            table_rows=inputs["table_rows"][:size],
            tables=self._tables,
            block_size=self._block_size,
            max_queries=queries,
            num_decoded=size,
        )

    def sampling_rows(self, size: int) -> SamplingRows:
        """What the draws of the first `size` rows depend on."""
        return self._sampling.rows(self._packed.tensors, size)

    def keep(self, tokens: Tensor, size: int) -> None:
        """Keep the tokens int64 [size] that were drawn, for rows that name them by LAST_SAMPLED."""
        self._last_tokens.scatter_(0, self._packed.tensors["seats"][:size], tokens)

    # Parts.

    def _place(self, rows: list[StepRow]) -> list[int]:
        present = {row.sequence_id for row in rows}
        return [self._seats.place(row, present) for row in rows]

    def _fill_tokens(self, rows: list[StepRow], seats: list[int], size: int) -> None:
        arrays = self._arrays
        tokens, sources, positions, slots = self._numbers(rows, seats)
        count = len(tokens)
        arrays["token_ids"][:count] = tokens
        arrays["sources"][:count] = sources
        arrays["positions"][:count] = positions
        arrays["slots"][:count] = slots
        arrays["token_ids"][count:size] = 0
        arrays["sources"][count:size] = -1
        arrays["positions"][count:size] = 0
        arrays["slots"][count:size] = -1

    def _numbers(self, rows: list[StepRow], seats: list[int]) -> tuple[list[int], list[int], list[int], list[int]]:
        """Of each token its id, the seat whose last token it is (then the id is 0) or -1, its position and its slot."""
        tokens: list[int] = []
        sources: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        size = self._block_size
        for row, seat in zip(rows, seats, strict=True):
            start, count = row.start, len(row.token_ids)
            tokens += row.token_ids
            if row.token_ids[-1] == LAST_SAMPLED:
                tokens[-1] = 0
                sources += [-1] * (count - 1)
                sources.append(seat)
            else:
                sources += [-1] * count
            if count == 1:
                positions.append(start)
                slots.append(row.block_table[start // size] * size + start % size)
            else:
                positions += range(start, start + count)
                slots += self._seats.slots(row, start + count)[start:].tolist()
        return tokens, sources, positions, slots

    def _fill_draws(self, rows: list[StepRow], seats: list[int], size: int) -> None:
        arrays = self._arrays
        drawn = [row.sample for row in rows]
        masks = {place: row.token_mask for place, row in enumerate(rows) if row.token_mask is not None}
        self._sampling.fill(arrays, [row.sequence_id for row in rows], drawn, masks, size)
        arrays["seats"][: len(rows)] = [
            seat if row.sample else self._rows for row, seat in zip(rows, seats, strict=True)
        ]
        arrays["seats"][len(rows) : size] = self._rows


def _sent(device: torch.device, *parts: list[int]) -> list[Tensor]:
    """The parts as int32 on the device, by one copy. Each begins where kernels may read 16 bytes at once."""
    fields = {str(place): (torch.int32, len(part)) for place, part in enumerate(parts)}
    packed = PackedInputs(fields, device, copies=1)
    arrays = packed.begin()
    for place, part in enumerate(parts):
        arrays[str(place)][:] = part
    packed.send()
    return [packed.tensors[str(place)] for place in range(len(parts))]


def _fields(tokens: int, rows: int) -> dict[str, tuple[torch.dtype, int]]:
    """The packed inputs: of tokens, of decoded sequences, of rows that draw, and changes of the block tables."""
    return {
        "token_ids": (torch.int64, tokens),
        "positions": (torch.int64, tokens),
        "slots": (torch.int64, tokens),
        "sources": (torch.int32, tokens),
        "lengths": (torch.int32, tokens),
        "query_starts": (torch.int32, tokens + 1),
        "table_rows": (torch.int32, tokens),
        "seats": (torch.int64, rows),
        "draws": (torch.int32, rows),
        "mask_rows": (torch.int32, rows),
        "edit_starts": (torch.int32, rows + 1),
        **{name: (dtype, rows) for name, (dtype, _) in COLUMNS.items()},
        "edit_places": (torch.int32, EDITS),
        "edit_values": (torch.int32, EDITS),
    }
