"""The runner on torch: a model's references or kernels, eagerly, with the sampler beside them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from deepseek_engine.batch import Batch
from deepseek_engine.departures import Interrupt
from deepseek_engine.runners.prompt_logprobs import prompt_logprobs, to_host
from deepseek_engine.runners.reference_watch import ReferenceWatch
from deepseek_engine.sampler import Sample, Sampler
from deepseek_engine.sampling import LogprobTensors
from deepseek_engine.settings import EngineSettings
from deepseek_engine.step_plan import LAST_SAMPLED, NewSequence, StepPlan, StepResult, StepRow

if TYPE_CHECKING:
    from deepseek_engine.models import Model


@dataclass(slots=True)
class TorchHandle:
    """A step under way: what it sampled, still on the device."""

    num_rows: int
    sampled_rows: list[int]
    sample: Sample | None
    prompt_logprobs: dict[int, list[LogprobTensors]]


class TorchRunner:
    """Runs a model on one device.

    Args:
        model: `models.load_model`'s.
        settings: sizes of the cache.
        device: where the model is.
    """

    # References wait for the device here and there within a step, so that nothing is gained by a second one.
    steps_in_flight = 1

    def __init__(self, model: "Model", settings: EngineSettings, device: torch.device | str = "cpu") -> None:
        self._model = model
        self._device = torch.device(device)
        spec = model.cache_spec()
        self.vocab_size = model.config.vocab_size
        self.max_position_embeddings = model.config.max_position_embeddings
        self.eos_token_ids = tuple(model.config.eos_token_ids)
        self.block_size = settings.block_size
        self.num_blocks = settings.blocks_for(spec.bytes_per_token)
        self.cache_format = repr(spec)
        self._cache = spec.allocate(self.num_blocks, self.block_size, self._device)
        self._references = ReferenceWatch(model.config, self._device, spec.planes[0].dtype)
        self._sampler = Sampler(self.vocab_size, self._device)
        self._known: dict[int, NewSequence] = {}
        # Where each sequence stands in the tokens sampled last, for rows that name them by LAST_SAMPLED.
        self._last_index: dict[int, int] = {}
        self._last_tokens: Tensor | None = None

    @torch.inference_mode()
    def execute(self, plan: StepPlan, interrupt: Interrupt | None = None) -> TorchHandle:
        """Start a step."""
        self._update(plan)
        rows = plan.rows
        if not rows:
            return TorchHandle(0, [], None, {})
        batch = self._batch(rows)
        batch.interrupt = interrupt
        hidden = self._references.forward(self._model.forward, batch, self._cache)
        logits_of = self._model.logits
        known_logprobs = {
            index: prompt_logprobs(
                logits_of,
                self.vocab_size,
                self._known[row.sequence_id],
                row,
                hidden[batch.query_starts[index] :],
            )
            for index, row in enumerate(rows)
            if row.prompt_logprobs
        }
        sampled = [index for index, row in enumerate(rows) if row.sample]
        sample = self._sample(rows, sampled, hidden, batch.query_starts) if sampled else None
        return TorchHandle(len(rows), sampled, sample, known_logprobs)

    def collect(self, handle: TorchHandle) -> StepResult:
        """Bring a step's tokens and log-probabilities to the host."""
        result = StepResult(token_ids=[[] for _ in range(handle.num_rows)])
        result.prompt_logprobs = {row: to_host(parts) for row, parts in handle.prompt_logprobs.items()}
        if handle.sample is None:
            return result
        for index, cause in handle.sample.errors().items():
            result.errors[handle.sampled_rows[index]] = cause
        tokens = handle.sample.tokens.tolist()
        for row, token in zip(handle.sampled_rows, tokens, strict=True):
            if row not in result.errors:
                result.token_ids[row] = [token]
        for index, logprobs in handle.sample.row_logprobs().items():
            if handle.sampled_rows[index] not in result.errors:
                result.logprobs[handle.sampled_rows[index]] = logprobs
        return result

    def _update(self, plan: StepPlan) -> None:
        for sequence_id in plan.finished:
            self._known.pop(sequence_id, None)
            self._sampler.remove(sequence_id)
        for sequence in plan.new:
            self._known[sequence.sequence_id] = sequence
            self._sampler.add(sequence)

    def _batch(self, rows: list[StepRow]) -> Batch:
        query_starts, context_lengths = [0], []
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        width = max(len(row.block_table) for row in rows)
        tables = []
        for row in rows:
            start, stop = row.start, row.start + len(row.token_ids)
            query_starts.append(query_starts[-1] + stop - start)
            context_lengths.append(stop)
            token_ids += row.token_ids
            positions += range(start, stop)
            self._add_slots(slots, row.block_table, start, stop)
            tables.append(row.block_table + [0] * (width - len(row.block_table)))
        # One transfer for the three, by numpy, which reads lists sooner than torch does.
        numbers = torch.from_numpy(np.array((token_ids, positions, slots), dtype=np.int64)).to(self._device)
        self._fill_last_sampled(numbers[0], rows, query_starts)
        return Batch(
            token_ids=numbers[0],
            positions=numbers[1],
            slots=numbers[2],
            query_starts=query_starts,
            context_lengths=context_lengths,
            block_tables=torch.from_numpy(np.array(tables, dtype=np.int64)).to(self._device),
            block_size=self.block_size,
        )

    def _add_slots(self, slots: list[int], block_table: list[int], start: int, stop: int) -> None:
        """Append the cache slots of positions start .. stop - 1, a block at a time."""
        size = self.block_size
        if stop - start == 1:
            slots.append(block_table[start // size] * size + start % size)
            return
        for place in range(start // size, (stop - 1) // size + 1):
            first = block_table[place] * size
            slots += range(first + max(start - place * size, 0), first + min(stop - place * size, size))

    def _fill_last_sampled(self, token_ids: Tensor, rows: list[StepRow], query_starts: list[int]) -> None:
        """Put the tokens sampled last where rows name them."""
        unknown = [index for index, row in enumerate(rows) if row.token_ids[-1] == LAST_SAMPLED]
        if not unknown:
            return
        if self._last_tokens is None:
            raise ValueError("a row names the token sampled last, but nothing was sampled in the step before")
        sources = [self._last_index[rows[index].sequence_id] for index in unknown]
        token_ids[[query_starts[index + 1] - 1 for index in unknown]] = self._last_tokens[sources]

    def _sample(self, rows: list[StepRow], sampled: list[int], hidden: Tensor, query_starts: list[int]) -> Sample:
        last = hidden
        if len(sampled) != hidden.shape[0]:
            last = hidden[[query_starts[index + 1] - 1 for index in sampled]]
        masks = {place: mask for place, index in enumerate(sampled) if (mask := rows[index].token_mask) is not None}
        sequence_ids = [rows[index].sequence_id for index in sampled]
        sample = self._sampler.sample(self._model.logits(last), sequence_ids, masks)
        self._last_index = {sequence_id: place for place, sequence_id in enumerate(sequence_ids)}
        self._last_tokens = sample.tokens
        return sample
