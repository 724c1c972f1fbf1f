"""What the next draw of each sequence depends on, ready for the sampling kernels."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from piccard_contract.sampling import MAX_TOKEN_ENTRIES

from deepseek_engine.kernels.sampling_triton import SamplingRows
from deepseek_engine.penalty_table import PenaltyTable
from deepseek_engine.step_plan import NewSequence

NO_DRAW = -1
"""The position of a row that draws nothing."""
EDITS_PER_ROW = 2 * MAX_TOKEN_ENTRIES + 64
"""Changed logits a row at most: logit_bias, and the ids that min_tokens forbids."""

COLUMNS: dict[str, tuple[torch.dtype, Any]] = {
    "temperature": (torch.float32, np.float32),
    "min_p": (torch.float32, np.float32),
    "top_k": (torch.int32, np.int32),
    "top_p": (torch.float32, np.float32),
    "repetition": (torch.float32, np.float32),
    "frequency": (torch.float32, np.float32),
    "presence": (torch.float32, np.float32),
    "seeds": (torch.int64, np.int64),
    "choices": (torch.int32, np.int32),
    "penalty_rows": (torch.int32, np.int32),
}
"""Numbers of a sequence that stay what they are."""


@dataclass(slots=True, eq=False)
class _State:
    sequence: NewSequence
    row: int
    num_output: int
    stop_ids: list[int]
    penalty_row: int


class SamplingSeats:
    """Sampling parameters and penalties of the sequences that run.

    Args:
        count: sequences at most.
        vocab_size: V.
        device: where penalties are counted.
    """

    def __init__(self, count: int, vocab_size: int, device: torch.device) -> None:
        self._states: dict[int, _State] = {}
        self._free: list[int] = []
        self._columns = {name: np.zeros(0, dtype=kind) for name, (_, kind) in COLUMNS.items()}
        self._device = device
        self._penalties = PenaltyTable(vocab_size, device, capacity=count)
        self._masks = torch.zeros(count, -(-vocab_size // 128) * 16, dtype=torch.uint8, device=device)
        capacity = count * EDITS_PER_ROW
        self._edit_tokens = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._edit_values = torch.zeros(capacity, dtype=torch.float32, device=device)
        self._edits_sent: tuple[list[tuple[int, int, bool]], int] = ([], 0)
        self._edit_starts: list[int] = []

    def add(self, sequence: NewSequence) -> None:
        """Start a sequence; its output_ids count as sampled."""
        params = sequence.params
        penalised = (
            params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        )
        if not self._free:
            self._grow()
        row = self._free.pop()
        penalty_row = self._penalties.add(sequence.prompt_ids, sequence.output_ids) if penalised else -1
        self._states[sequence.sequence_id] = _State(
            sequence=sequence,
            row=row,
            num_output=len(sequence.output_ids),
            stop_ids=sorted({*sequence.eos_ids, *params.stop_token_ids}),
            penalty_row=penalty_row,
        )
        values: dict[str, float] = {
            "temperature": 0.0 if params.greedy else params.temperature,
            "min_p": params.min_p,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "repetition": params.repetition_penalty,
            "frequency": params.frequency_penalty,
            "presence": params.presence_penalty,
            # The bits of an unsigned 64-bit seed.
            "seeds": (sequence.seed & 0x7FFFFFFFFFFFFFFF) - (sequence.seed & 0x8000000000000000),
            "choices": sequence.choice,
            "penalty_rows": penalty_row,
        }
        for name, value in values.items():
            self._columns[name][row] = value

    def remove(self, sequence_id: int) -> None:
        """Forget a sequence; unknown ones are ignored."""
        state = self._states.pop(sequence_id, None)
        if state is None:
            return
        if state.penalty_row >= 0:
            self._penalties.remove(state.penalty_row)
        self._free.append(state.row)
        # Another sequence may come by this name.
        self._edits_sent = [], 0

    @property
    def generation(self) -> int:
        """Changes when the device's tensors are others than before; a captured graph knows those it was made with."""
        return self._penalties.generation

    def sequence(self, sequence_id: int) -> NewSequence:
        """What `add` was given."""
        return self._states[sequence_id].sequence

    def fill(
        self,
        arrays: dict[str, npt.NDArray[Any]],
        sequence_ids: list[int],
        drawn: list[bool],
        masks: dict[int, bytes],
        padded: int,
    ) -> None:
        """Write the rows of a step, `padded` of them with those that draw nothing, and count what they draw.

        Args:
            arrays: the fields of COLUMNS, and "draws", "mask_rows" and "edit_starts".
            sequence_ids: the rows' sequences.
            drawn: whether a row draws a token.
            masks: row to the bits of the tokens that may be drawn.
            padded: rows of the arrays that count.
        """
        count = len(sequence_ids)
        states = [self._states[sequence_id] for sequence_id in sequence_ids]
        rows = [state.row for state in states]
        for name, column in self._columns.items():
            arrays[name][:count] = column[rows]
            arrays[name][count:padded] = 0
        arrays["penalty_rows"][count:padded] = -1
        arrays["draws"][:count] = [
            state.num_output if draws else NO_DRAW for state, draws in zip(states, drawn, strict=True)
        ]
        arrays["draws"][count:padded] = NO_DRAW
        arrays["mask_rows"][:padded] = -1
        for row, mask in masks.items():
            arrays["mask_rows"][row] = row
            self._masks[row, : len(mask)] = torch.frombuffer(bytearray(mask), dtype=torch.uint8).to(self._device)
        self._fill_edits(arrays["edit_starts"], states, padded)
        for state, draws in zip(states, drawn, strict=True):
            state.num_output += draws

    def rows(self, tensors: dict[str, torch.Tensor], count: int) -> SamplingRows:
        """The kernels' view of the first `count` rows of device tensors that `fill` wrote."""
        return SamplingRows(
            **{name: tensors[name][:count] for name in COLUMNS},
            positions=tensors["draws"][:count],
            counts=self._penalties.output_counts,
            prompt=self._penalties.prompt_seen.view(torch.int8),
            mask_rows=tensors["mask_rows"][:count],
            masks=self._masks,
            edit_starts=tensors["edit_starts"][: count + 1],
            edit_tokens=self._edit_tokens,
            edit_values=self._edit_values,
        )

    def _grow(self) -> None:
        """Preempted sequences keep their rows, so there may be more of them than run at once."""
        known = len(self._columns["seeds"])
        more = max(64, known)
        self._columns = {
            name: np.concatenate((column, np.zeros(more, column.dtype))) for name, column in self._columns.items()
        }
        self._free.extend(range(known + more - 1, known - 1, -1))

    def _fill_edits(self, starts: npt.NDArray[Any], states: list[_State], padded: int) -> None:
        """Biases and forbidden ids; they are sent again only when rows or their min_tokens have changed."""
        edited = [
            (place, state.sequence.sequence_id, state.num_output < state.sequence.params.min_tokens)
            for place, state in enumerate(states)
            if state.sequence.params.logit_bias or state.sequence.params.min_tokens
        ]
        if not edited:
            starts[: padded + 1] = 0
            return
        if (edited, padded) != self._edits_sent:
            self._send_edits(edited, states, padded)
        starts[: padded + 1] = self._edit_starts

    def _send_edits(self, edited: list[tuple[int, int, bool]], states: list[_State], padded: int) -> None:
        tokens: list[int] = []
        values: list[float] = []
        counts = np.zeros(padded + 1, dtype=np.int64)
        for place, _, short in edited:
            bias = states[place].sequence.params.logit_bias
            forbidden = states[place].stop_ids if short else []
            tokens += [*bias.keys(), *forbidden]
            values += [*bias.values(), *([float("-inf")] * len(forbidden))]
            counts[place + 1] = len(bias) + len(forbidden)
        self._edit_starts = counts.cumsum().tolist()
        self._edit_tokens[: len(tokens)] = torch.tensor(tokens, dtype=torch.int32).to(self._device)
        self._edit_values[: len(tokens)] = torch.tensor(values, dtype=torch.float32).to(self._device)
        self._edits_sent = edited, padded
