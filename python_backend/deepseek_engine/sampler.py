"""Samples a token for each row of a batch, whatever mixture of parameters its rows have.

A row's draw depends on its own logits, parameters, tokens and place only, never on the other rows. What the rows need
is worked out once for a composition of the batch; a batch that is all greedy costs one maximum.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from piccard_contract.sampling import SamplingParams
from torch import Tensor

from deepseek_engine import sampling
from deepseek_engine.penalty_table import PenaltyTable
from deepseek_engine.random_numbers import UniformStream
from deepseek_engine.sampling import LogprobTensors
from deepseek_engine.step_plan import NewSequence, RowLogprobs


@dataclass(slots=True, eq=False)
class _State:
    """One sequence: what its next draw depends on beside the logits."""

    params: SamplingParams
    uniforms: UniformStream
    num_output: int
    stop_ids: list[int]
    penalty_row: int | None


@dataclass(slots=True)
class _Drawn:
    """Rows that are drawn, not greedy. `rows` is None where all are."""

    rows: Tensor | None
    states: list[_State]
    temperature: Tensor
    min_p: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None


@dataclass(slots=True)
class _Penalised:
    """Rows with penalties, their rows of the table, and the factors, [P, 1] each."""

    rows: Tensor
    table_rows: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


@dataclass(slots=True)
class _Layout:
    """What a composition of the batch needs."""

    states: list[_State]
    drawn: _Drawn | None
    penalised: _Penalised | None = None
    bias: tuple[Tensor, Tensor, Tensor] | None = None
    min_tokens: list[int] = field(default_factory=list)
    logprob_rows: list[int] = field(default_factory=list)
    logprob_index: Tensor | None = None
    logprob_count: int = 0


@dataclass(slots=True)
class Sample:
    """What was sampled, on the device.

    Attributes:
        tokens: [R] int64.
        raw_peaks: [R] largest raw logit; not finite where the model failed.
        peaks: [R] largest logit once masks were applied; -inf where they left no token.
        logprobs: of the rows `logprob_rows`, in their order.
        logprob_rows: rows that asked for log-probabilities.
        logprob_counts: how many of the most likely tokens each of them asked for.
    """

    tokens: Tensor
    raw_peaks: Tensor
    peaks: Tensor
    logprobs: LogprobTensors | None
    logprob_rows: list[int]
    logprob_counts: list[int]

    def errors(self) -> dict[int, str]:
        """Rows whose logits were not numbers or left nothing to sample, with the cause."""
        causes: dict[int, str] = {}
        raw_peaks: list[float] = self.raw_peaks.tolist()
        peaks = raw_peaks if self.peaks is self.raw_peaks else self.peaks.tolist()
        # A sum of float32 in float64 is finite where all of them are.
        if math.isfinite(sum(raw_peaks) + sum(peaks)):
            return causes
        for row, (raw_peak, peak) in enumerate(zip(raw_peaks, peaks, strict=True)):
            if not math.isfinite(raw_peak):
                causes[row] = f"the model's logits are not numbers (their largest is {raw_peak})"
            elif not math.isfinite(peak):
                causes[row] = "masks and biases leave no token to sample"
        return causes

    def row_logprobs(self) -> dict[int, RowLogprobs]:
        """The log-probabilities by row, on the host."""
        if self.logprobs is None:
            return {}
        return {
            row: RowLogprobs([ids[: 1 + count]], [values[: 1 + count]], [rank])
            for row, count, ids, values, rank in zip(
                self.logprob_rows,
                self.logprob_counts,
                self.logprobs.token_ids.tolist(),
                self.logprobs.logprobs.tolist(),
                self.logprobs.ranks.tolist(),
                strict=True,
            )
        }


class Sampler:
    """Per-sequence sampling state and the batched draw.

    Args:
        vocab_size: V.
        device: where the logits are.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._states: dict[int, _State] = {}
        self._penalties = PenaltyTable(vocab_size, device)
        self._layout_ids: list[int] = []
        self._layout: _Layout | None = None

    def add(self, sequence: NewSequence) -> None:
        """Start a sequence; its output_ids count as sampled."""
        params = sequence.params
        penalised = (
            params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        )
        self._states[sequence.sequence_id] = _State(
            params=params,
            uniforms=UniformStream(sequence.seed, sequence.choice),
            num_output=len(sequence.output_ids),
            stop_ids=sorted({*sequence.eos_ids, *params.stop_token_ids}),
            penalty_row=self._penalties.add(sequence.prompt_ids, sequence.output_ids) if penalised else None,
        )

    def remove(self, sequence_id: int) -> None:
        """Forget a sequence; unknown ones are ignored, since one may end before it ever ran."""
        state = self._states.pop(sequence_id, None)
        if state is not None and state.penalty_row is not None:
            self._penalties.remove(state.penalty_row)
        self._layout_ids = []

    def sample(self, raw: Tensor, sequence_ids: list[int], token_masks: dict[int, bytes] | None = None) -> Sample:
        """Sample one token a row and count it as output.

        Args:
            raw: [R, V] float32 logits; left as they are.
            sequence_ids: whose rows these are.
            token_masks: by row, the bits of tokens that may be sampled (`StepRow.token_mask`).
        """
        layout = self._layout_of(sequence_ids)
        logits = self._edited(raw, layout, token_masks)
        peaks, tokens = _largest(logits)
        raw_peaks = peaks if logits is raw else raw.amax(dim=-1)
        if layout.drawn is not None:
            tokens = self._draw(logits, tokens, layout.drawn)
        logprobs = None
        if layout.logprob_rows:
            index = layout.logprob_index
            told, chosen = (raw, tokens) if index is None else (raw[index], tokens[index])
            logprobs = sampling.gather_logprobs(told, chosen, layout.logprob_count)
        if layout.penalised is not None:
            self._penalties.count(layout.penalised.table_rows, tokens[layout.penalised.rows])
        for state in layout.states:
            state.num_output += 1
        counts = [layout.states[row].params.logprobs or 0 for row in layout.logprob_rows]
        return Sample(tokens, raw_peaks, peaks, logprobs, layout.logprob_rows, counts)

    def _edited(self, raw: Tensor, layout: _Layout, token_masks: dict[int, bytes] | None) -> Tensor:
        """Logits with penalties, biases and masks; `raw` itself where no row has any."""
        short = [
            row for row in layout.min_tokens if layout.states[row].num_output < layout.states[row].params.min_tokens
        ]
        if layout.penalised is None and layout.bias is None and not short and not token_masks:
            return raw
        logits = raw.clone()
        if layout.penalised is not None:
            self._penalise(logits, layout.penalised)
        if layout.bias is not None:
            rows, tokens, values = layout.bias
            logits[rows, tokens] += values
        for row in short:
            logits[row, layout.states[row].stop_ids] = float("-inf")
        for row, mask in (token_masks or {}).items():
            allowed = np.unpackbits(np.frombuffer(mask, np.uint8), count=self._vocab_size, bitorder="little")
            logits[row].masked_fill_(torch.from_numpy(allowed).to(self._device) == 0, float("-inf"))
        return logits

    def _penalise(self, logits: Tensor, penalised: _Penalised) -> None:
        logits[penalised.rows] = sampling.apply_penalties(
            logits[penalised.rows],
            self._penalties.output_counts[penalised.table_rows],
            self._penalties.prompt_seen[penalised.table_rows],
            penalised.repetition,
            penalised.frequency,
            penalised.presence,
        )

    def _draw(self, logits: Tensor, greedy_tokens: Tensor, drawn: _Drawn) -> Tensor:
        """Greedy tokens with those of the drawn rows put in."""
        scaled = (logits if drawn.rows is None else logits[drawn.rows]) / drawn.temperature
        if drawn.min_p is not None:
            scaled = sampling.apply_min_p(scaled, drawn.min_p)
        if drawn.top_k is not None:
            scaled = sampling.apply_top_k(scaled, drawn.top_k)
        if drawn.top_p is not None:
            scaled = sampling.apply_top_p(scaled, drawn.top_p)
        numbers = [state.uniforms.at(state.num_output) for state in drawn.states]
        tokens = sampling.draw(scaled, torch.tensor(numbers, dtype=torch.float64, device=self._device))
        if drawn.rows is None:
            return tokens
        return greedy_tokens.index_copy(0, drawn.rows, tokens)

    def _layout_of(self, sequence_ids: list[int]) -> _Layout:
        if self._layout is None or self._layout_ids != sequence_ids:
            self._layout = self._make_layout([self._states[sequence_id] for sequence_id in sequence_ids])
            self._layout_ids = list(sequence_ids)
        return self._layout

    def _make_layout(self, states: list[_State]) -> _Layout:
        params = [state.params for state in states]
        logprob_rows = [row for row, param in enumerate(params) if param.logprobs is not None]
        return _Layout(
            states=states,
            drawn=self._make_drawn(states),
            penalised=self._make_penalised(states),
            bias=self._make_bias(params),
            min_tokens=[row for row, state in enumerate(states) if state.params.min_tokens and state.stop_ids],
            logprob_rows=logprob_rows,
            logprob_index=None if len(logprob_rows) == len(states) else self._integers(logprob_rows),
            logprob_count=min(max((param.logprobs or 0 for param in params), default=0), self._vocab_size),
        )

    def _make_drawn(self, states: list[_State]) -> _Drawn | None:
        rows = [row for row, state in enumerate(states) if not state.params.greedy]
        if not rows:
            return None
        drawn = [states[row] for row in rows]
        params = [state.params for state in drawn]
        return _Drawn(
            rows=None if len(rows) == len(states) else self._integers(rows),
            states=drawn,
            temperature=self._column([param.temperature for param in params]),
            min_p=self._column([param.min_p for param in params]) if any(param.min_p > 0 for param in params) else None,
            top_k=(
                self._integers([param.top_k for param in params]).unsqueeze(-1)
                if any(0 < param.top_k < self._vocab_size for param in params)
                else None
            ),
            top_p=self._column([param.top_p for param in params]) if any(param.top_p < 1 for param in params) else None,
        )

    def _make_penalised(self, states: list[_State]) -> _Penalised | None:
        rows = [row for row, state in enumerate(states) if state.penalty_row is not None]
        if not rows:
            return None
        params = [states[row].params for row in rows]
        return _Penalised(
            rows=self._integers(rows),
            table_rows=self._integers([states[row].penalty_row or 0 for row in rows]),
            repetition=self._column([param.repetition_penalty for param in params]),
            frequency=self._column([param.frequency_penalty for param in params]),
            presence=self._column([param.presence_penalty for param in params]),
        )

    def _make_bias(self, params: list[SamplingParams]) -> tuple[Tensor, Tensor, Tensor] | None:
        entries = [(row, token, bias) for row, param in enumerate(params) for token, bias in param.logit_bias.items()]
        if not entries:
            return None
        rows, tokens, values = zip(*entries, strict=True)
        return (
            self._integers(list(rows)),
            self._integers(list(tokens)),
            torch.tensor(values, dtype=torch.float32, device=self._device),
        )

    def _integers(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _column(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device).unsqueeze(-1)


def _largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row [R, V] the largest value and its first place, [R] each; NaN where there is one."""
    if logits.device.type != "cpu":
        peaks, tokens = logits.max(dim=-1)
        return peaks, tokens
    # numpy looks at vectors of elements, where torch on a CPU looks at one after the other.
    values = logits.numpy()
    tokens = values.argmax(axis=-1)
    return torch.from_numpy(values[np.arange(len(tokens)), tokens]), torch.from_numpy(tokens)
