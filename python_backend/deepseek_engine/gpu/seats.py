"""Where sequences sit in the arrays that stay on the device."""

import numpy as np
import numpy.typing as npt

from deepseek_engine.step_plan import StepRow


class Seats:
    """A seat for each sequence that runs: its row of the block tables and its place among the tokens sampled last.

    The tables are mirrored here, so that only what has changed is sent.

    Args:
        count: seats; one more stands for nobody, where padded rows write.
        blocks: blocks of the longest table.
        block_size: tokens a block.
    """

    def __init__(self, count: int, blocks: int, block_size: int) -> None:
        self.count = count
        self.blocks = blocks
        self._block_size = block_size
        self._free = list(range(count - 1, -1, -1))
        self._seats: dict[int, int] = {}
        self._tables = [[0] * blocks for _ in range(count)]
        # Of each seat: how many blocks are known, and the position up to which they were used without a break.
        self._known = [0] * count
        self._reached = [-1] * count
        self._edits: dict[int, int] = {}

    def release(self, sequence_id: int) -> None:
        """Free the seat of a sequence; unknown ones are ignored, since one may end before it ever ran."""
        seat = self._seats.pop(sequence_id, None)
        if seat is not None:
            self._reached[seat] = -1
            self._free.append(seat)

    def place(self, row: StepRow, present: set[int]) -> int:
        """The seat of a row's sequence, with its table brought up to date.

        `present` are the step's sequences. Of others, which were preempted, one may lose its seat.
        """
        seat = self._seats.get(row.sequence_id)
        if seat is None:
            if not self._free:
                self.release(next(other for other in self._seats if other not in present))
            seat = self._seats[row.sequence_id] = self._free.pop()
        table = row.block_table
        first = self._known[seat]
        # A sequence that goes on where it stood has its old blocks. One that was preempted may have any, and comes back
        # at the start of a block, which may be where it stood.
        goes_on = row.start == self._reached[seat] and row.start % self._block_size
        if not goes_on and self._tables[seat][:first] != table[:first]:
            first = 0
        if first < len(table):
            self._change(seat, first, table)
        self._known[seat] = len(table)
        self._reached[seat] = row.start + len(row.token_ids)
        return seat

    def seat_of(self, sequence_id: int) -> int:
        """The seat of a sequence that was placed."""
        return self._seats[sequence_id]

    def edits(self) -> tuple[list[int], list[int]]:
        """Flat places of the tables and their new values since the last call."""
        edits, self._edits = self._edits, {}
        return list(edits.keys()), list(edits.values())

    def slots(self, row: StepRow, stop: int) -> npt.NDArray[np.int64]:
        """int64 [stop]: the cache slots of a row's positions 0 .. stop - 1."""
        size = self._block_size
        blocks = np.asarray(row.block_table[: -(-stop // size)], dtype=np.int64) * size
        return (blocks[:, None] + np.arange(size, dtype=np.int64)).reshape(-1)[:stop]

    def _change(self, seat: int, first: int, table: list[int]) -> None:
        mirror = self._tables[seat]
        base = seat * self.blocks
        for place in range(first, len(table)):
            if mirror[place] != table[place]:
                mirror[place] = table[place]
                self._edits[base + place] = table[place]
