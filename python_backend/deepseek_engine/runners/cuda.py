"""The runner on a CUDA device: steps run from graphs, each launched before the last one's tokens are read."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from piccard_contract.sampling import SamplingParams
from torch import Tensor

from deepseek_engine.departures import Interrupt
from deepseek_engine.gpu.buckets import bucket_of, decode_buckets, token_buckets
from deepseek_engine.gpu.device_model import DeviceModel
from deepseek_engine.gpu.prefill_groups import EXPANDED_TOKENS
from deepseek_engine.gpu.sampling_seats import SamplingSeats
from deepseek_engine.gpu.step_graphs import StepGraphs
from deepseek_engine.gpu.step_inputs import StepInputs
from deepseek_engine.kernels import launcher, sampling_triton
from deepseek_engine.kernels.precompile import precompile
from deepseek_engine.runners.prompt_logprobs import prompt_logprobs, to_host
from deepseek_engine.sampling import LogprobTensors, gather_logprobs
from deepseek_engine.settings import EngineSettings
from deepseek_engine.step_plan import NewSequence, RowLogprobs, StepPlan, StepResult, StepRow

GRAPH_TOKENS = 512
"""Tokens of a step that runs from graphs; longer ones are busy long enough for the host to launch them."""
CHUNK_QUERIES = 4
"""Query tokens of a prompt that the decode kernel takes at once in a step from graphs."""
_LONG_SIZES = (1024, 2048, 4097)
"""Tokens of steps beyond the graphs: one on either side of what the tables of gates and experts tell apart."""

_CAUSES = {
    sampling_triton.NOT_NUMBERS: "the model's logits are not numbers",
    sampling_triton.NOTHING_LEFT: "masks and biases leave no token to sample",
}


@dataclass(slots=True)
class CudaHandle:
    """A step under way.

    Attributes:
        rows: how many the plan has.
        places: the plan's row of each sampled one.
        tokens, status: of the sampled rows, on their way to the host.
        logprobs: the plan's row, how many likely tokens it asked for, and its place in `logprob_parts`.
        done: recorded once all of it is there.
    """

    rows: int
    places: list[int] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)
    tokens: Tensor | None = None
    status: Tensor | None = None
    logprobs: list[tuple[int, int]] = field(default_factory=list)
    logprob_parts: LogprobTensors | None = None
    prompt_logprobs: dict[int, list[LogprobTensors]] = field(default_factory=dict)
    done: Any = None


class CudaRunner:
    """Runs a model on one CUDA device.

    A step of decodes is one graph, sampling included; one of up to GRAPH_TOKENS tokens is a graph for the model and one
    for the head; longer ones are launched kernel by kernel.

    Args:
        model: `gpu.decoder.load_gpu_model`'s, or a `gpu.onnx_decoder.OnnxDecoder`.
        settings: sizes of cache and batch.
        num_blocks: blocks of the cache; None takes what settings say.
        graph_tokens: tokens of a step that runs from graphs; never less than one a sequence.
        expanded_tokens: context whose keys and values are expanded at once.

    Attributes:
        eager: run everything kernel by kernel, at the same sizes.
        graphs: counts captures and replays.
    """

    steps_in_flight = 2

    def __init__(
        self,
        model: DeviceModel,
        settings: EngineSettings,
        num_blocks: int | None = None,
        *,
        graph_tokens: int = GRAPH_TOKENS,
        expanded_tokens: int = EXPANDED_TOKENS,
    ) -> None:
        self.model = model
        self.eager = False
        self._device = model.device
        spec = model.cache_spec()
        self.vocab_size = model.config.vocab_size
        self.max_position_embeddings = model.config.max_position_embeddings
        self.eos_token_ids = tuple(model.config.eos_token_ids)
        self.block_size = settings.block_size
        self.num_blocks = num_blocks or settings.blocks_for(spec.bytes_per_token)
        self.cache_format = repr(spec)
        self._cache = spec.allocate(self.num_blocks, self.block_size, self._device)
        self._context = settings.context_for(self.max_position_embeddings, self.num_blocks)
        self._rows = settings.max_num_seqs
        self._sampling = SamplingSeats(self._rows, self.vocab_size, self._device)
        self._graph_tokens = max(graph_tokens, self._rows)
        self._logits = torch.empty(self._rows, self.vocab_size, dtype=torch.float32, device=self._device)
        self._hidden = torch.zeros(self._rows, model.config.hidden_size, dtype=model.dtype, device=self._device)
        self._inputs = StepInputs(
            tokens=self._graph_tokens,
            rows=self._rows,
            context=self._context,
            block_size=self.block_size,
            sampling=self._sampling,
            device=self._device,
        )
        self._decode_sizes = decode_buckets(self._rows)
        self._token_sizes = token_buckets(self._graph_tokens)
        self.graphs: StepGraphs[tuple[Tensor, ...]] = StepGraphs(self._device)
        self._generation = self._sampling.generation
        self._batched_tokens = settings.max_num_batched_tokens
        self._expanded = expanded_tokens

    def capture(self) -> None:
        """Capture every graph; steps until now, and those beyond the buckets, run kernel by kernel."""
        self._send_nothing()
        with torch.inference_mode():
            for key, function in self._graph_functions():
                self.graphs.capture(key, function)
        self._generation = self._sampling.generation

    def precompile(self) -> None:
        """Compile what any step needs, many rows at once."""
        if self._device.type != "cuda":
            return
        self._send_nothing()
        with launcher.recording() as rows, torch.inference_mode():
            for _, function in self._graph_functions():
                function()
            self.longest_steps()
        # What these steps were to bring to the tables never got there.
        self._inputs.forget()
        precompile(rows, launcher.capability(self._device))

    def _send_nothing(self) -> None:
        """Inputs of padded rows alone."""
        self._inputs.begin()
        self._inputs.fill_nothing()
        self._inputs.send()

    @torch.inference_mode()
    def largest_graphs(self) -> None:
        """Run what graphs hold, kernel by kernel, at its largest."""
        self._send_nothing()
        if not self.model.batch_invariant:
            self._run_tokens(self._token_sizes[-1])
        self._run_decode(self._decode_sizes[-1])

    def longest_steps(self) -> None:
        """Run prompts of every length for which kernels differ, the longest chunk at the end of a long context too."""
        most = min(self._batched_tokens, self._rows * self._context)
        context = min(self._expanded, self._context)
        for count in sorted({min(size, most) for size in (self._graph_tokens + 1, *_LONG_SIZES, most)}):
            self._run_long(count, context)
        longest = min(most, self._context)
        if longest > self._graph_tokens and self.model.expands_keys:
            # A context that is expanded in several chunks, without having to be that long.
            expanded, self._expanded = self._expanded, longest // 2
            try:
                self._run_long(longest, longest)
            finally:
                self._expanded = expanded

    def _run_long(self, count: int, context: int) -> None:
        """`count` tokens of as few prompts as hold them, at the end of `context` or more; whatever is in the cache."""
        new, rows = [], []
        for identity, first in enumerate(range(0, count, self._context), start=1):
            own = min(self._context, count - first)
            stop = max(own, context)
            new.append(NewSequence(-identity, SamplingParams(), [0] * stop, [], 0, (), 0))
            table = list(range(-(-stop // self.block_size)))
            rows.append(StepRow(-identity, [0] * own, stop - own, table, sample=True))
        self.collect(self.execute(StepPlan(rows, new=new)))
        self.execute(StepPlan([], finished=[row.sequence_id for row in rows]))

    def _graph_functions(self) -> Iterator[tuple[tuple[str, int], Callable[[], tuple[Tensor, ...]]]]:
        # The largest first: the others fit into the memory that it leaves. Heads come after what they are used with, so
        # that none of them takes the memory in which a step's hidden states wait.
        for size in () if self.model.batch_invariant else reversed(self._token_sizes):
            yield ("tokens", size), partial(self._run_tokens, size)
        for size in reversed(self._decode_sizes):
            yield ("head", size), partial(self._run_head, size)
            yield ("decode", size), partial(self._run_decode, size)

    @torch.inference_mode()
    def execute(self, plan: StepPlan, interrupt: Interrupt | None = None) -> CudaHandle:
        """Start a step; it is on the device before anybody could interrupt it."""
        del interrupt
        self._update(plan)
        rows = plan.rows
        if not rows:
            return CudaHandle(0)
        # Rows of one token first: the decode kernel attends to them.
        order = sorted(range(len(rows)), key=lambda index: len(rows[index].token_ids) > 1)
        if len(rows[order[-1]].token_ids) == 1:
            return self._decode(rows, order)
        # Prompts that are attended to as decodes where they are short would not be the same bits in a longer step.
        if plan.num_tokens <= self._graph_tokens and not self.model.batch_invariant:
            return self._short(rows, order)
        return self._long(rows, order)

    def collect(self, handle: CudaHandle) -> StepResult:
        """Wait for a step and bring its tokens and log-probabilities to the host."""
        result = StepResult(token_ids=[[] for _ in range(handle.rows)])
        if handle.done is not None:
            handle.done.synchronize()
        result.prompt_logprobs = {row: to_host(parts) for row, parts in handle.prompt_logprobs.items()}
        if handle.tokens is None or handle.status is None:
            return result
        tokens, statuses = handle.tokens.tolist(), handle.status.tolist()
        for place, row in zip(handle.drawn, handle.places, strict=True):
            if statuses[place]:
                result.errors[row] = _CAUSES[statuses[place]]
            else:
                result.token_ids[row] = [tokens[place]]
        if handle.logprob_parts is not None:
            self._take_logprobs(handle, handle.logprob_parts, result)
        return result

    def _take_logprobs(self, handle: CudaHandle, parts: LogprobTensors, result: StepResult) -> None:
        ids, values, ranks = parts.token_ids.tolist(), parts.logprobs.tolist(), parts.ranks.tolist()
        for place, (row, count) in enumerate(handle.logprobs):
            if row not in result.errors:
                result.logprobs[row] = RowLogprobs(
                    [ids[place][: 1 + count]], [values[place][: 1 + count]], [ranks[place]]
                )

    def _update(self, plan: StepPlan) -> None:
        for sequence_id in plan.finished:
            self._inputs.release(sequence_id)
            self._sampling.remove(sequence_id)
        for sequence in plan.new:
            self._sampling.add(sequence)

    # The three kinds of steps.

    def _decode(self, rows: list[StepRow], order: list[int]) -> CudaHandle:
        """Every row has one token: one graph."""
        size = bucket_of(self._decode_sizes, len(rows))
        assert size is not None, "more rows than max_num_seqs"
        self._inputs.begin()
        self._inputs.fill_decodes(rows, size)
        self._inputs.send()
        hidden, tokens, status = self.graphs.run(("decode", size), eager=self._is_eager(("decode", size)))
        return self._handle(rows, order, list(range(len(rows))), hidden, tokens, status)

    def _short(self, rows: list[StepRow], order: list[int]) -> CudaHandle:
        """Few tokens: one graph for the model, one for the head. Prompts are decoded a few queries at a time."""
        ordered = [rows[index] for index in order]
        total = sum(len(row.token_ids) for row in ordered)
        size = bucket_of(self._token_sizes, total)
        assert size is not None
        self._inputs.begin()
        self._inputs.fill_short(ordered, size, CHUNK_QUERIES)
        sampled, heads = self._fill_head(ordered)
        self._inputs.send()
        (hidden,) = self.graphs.run(("tokens", size), eager=self._is_eager(("tokens", size)))
        return self._finish(rows, order, ordered, sampled, heads, hidden)

    def _long(self, rows: list[StepRow], order: list[int]) -> CudaHandle:
        """Many tokens: prompts have kernels of their own."""
        self.graphs.go_without("longer than the graphs")
        ordered = [rows[index] for index in order]
        self._inputs.begin()
        if self.model.takes_whole_rows:
            step = self._inputs.fill_whole(ordered)
        else:
            step = self._inputs.fill_long(ordered, self._expanded if self.model.expands_keys else None)
        sampled, heads = self._fill_head(ordered)
        self._inputs.send()
        self._inputs.apply_edits()
        hidden = self.model.forward(step, self._cache)
        return self._finish(rows, order, ordered, sampled, heads, hidden)

    def _fill_head(self, ordered: list[StepRow]) -> tuple[list[int], int]:
        """The places of `ordered` that draw, and the bucket of the head."""
        sampled = [place for place, row in enumerate(ordered) if row.sample]
        size = bucket_of(self._decode_sizes, max(len(sampled), 1))
        assert size is not None
        if sampled:
            self._inputs.fill_head([ordered[place] for place in sampled], size)
        return sampled, size

    def _finish(
        self,
        rows: list[StepRow],
        order: list[int],
        ordered: list[StepRow],
        sampled: list[int],
        size: int,
        hidden: Tensor,
    ) -> CudaHandle:
        """The head of a step that is not all decodes; `sampled` are places of `ordered`."""
        if not sampled:
            return self._handle(rows, order, [], hidden, None, None)
        ends = np.cumsum([len(row.token_ids) for row in ordered])
        index = torch.from_numpy(ends[sampled] - 1).to(self._device, non_blocking=True)
        torch.index_select(hidden, 0, index, out=self._hidden[: len(sampled)])
        tokens, status = self.graphs.run(("head", size), eager=self._is_eager(("head", size)))
        return self._handle(rows, order, sampled, hidden, tokens, status)

    # What graphs run. They read the packed inputs and write the cache and the last tokens.

    def _run_decode(self, size: int) -> tuple[Tensor, ...]:
        self._inputs.apply_edits()
        hidden = self.model.forward(self._inputs.step(size, 1), self._cache)
        return hidden, *self._sample(hidden, size)

    def _run_tokens(self, size: int) -> tuple[Tensor, ...]:
        self._inputs.apply_edits()
        return (self.model.forward(self._inputs.step(size, CHUNK_QUERIES), self._cache),)

    def _run_head(self, size: int) -> tuple[Tensor, ...]:
        return self._sample(self._hidden[:size], size)

    def _sample(self, hidden: Tensor, size: int) -> tuple[Tensor, Tensor]:
        logits = self.model.logits(hidden, self._logits[:size])
        tokens, status = sampling_triton.sample(logits, self._inputs.sampling_rows(size))
        self._inputs.keep(tokens, size)
        return tokens, status

    def _is_eager(self, key: tuple[str, int]) -> bool:
        """Whether a step runs kernel by kernel: as told, or because a graph knows tensors that were replaced."""
        stale = key[0] != "tokens" and self._generation != self._sampling.generation
        if key not in self.graphs:
            kind, size = key
            run = {"decode": self._run_decode, "tokens": self._run_tokens, "head": self._run_head}[kind]
            self.graphs.define(key, partial(run, size))
        return self.eager or stale

    # What a step leaves.

    def _handle(
        self,
        rows: list[StepRow],
        order: list[int],
        sampled: list[int],
        hidden: Tensor,
        tokens: Tensor | None,
        status: Tensor | None,
    ) -> CudaHandle:
        """`sampled` are places of `order`, in the order of `tokens`."""
        handle = CudaHandle(len(rows))
        drawn = [place for place, at in enumerate(sampled) if rows[order[at]].sample]
        handle.drawn, handle.places = drawn, [order[sampled[place]] for place in drawn]
        if tokens is not None and status is not None:
            wanted = [
                (place, row, count)
                for place, row in zip(drawn, handle.places, strict=True)
                if (count := self._sampling.sequence(rows[row].sequence_id).params.logprobs) is not None
            ]
            if wanted:
                handle.logprobs = [(row, count) for _, row, count in wanted]
                handle.logprob_parts = self._logprobs([place for place, _, _ in wanted], handle.logprobs, tokens)
            handle.tokens = tokens.to("cpu", non_blocking=True)
            handle.status = status.to("cpu", non_blocking=True)
        if any(row.prompt_logprobs for row in rows):
            handle.prompt_logprobs = self._prompt_logprobs(rows, order, hidden)
        if self._device.type == "cuda":
            handle.done = torch.cuda.Event()
            handle.done.record()
        return handle

    def _logprobs(self, places: list[int], wanted: list[tuple[int, int]], tokens: Tensor) -> LogprobTensors:
        index = torch.tensor(places, dtype=torch.int64).to(self._device, non_blocking=True)
        count = min(max(count for _, count in wanted), self.vocab_size)
        parts = gather_logprobs(self._logits[index], tokens[index], count)
        return _sent(parts)

    def _prompt_logprobs(
        self, rows: list[StepRow], order: list[int], hidden: Tensor
    ) -> dict[int, list[LogprobTensors]]:
        parts = {}
        first = 0
        for index in order:
            row = rows[index]
            if row.prompt_logprobs:
                sequence = self._sampling.sequence(row.sequence_id)
                parts[index] = [
                    _sent(part)
                    for part in prompt_logprobs(self.model.logits, self.vocab_size, sequence, row, hidden[first:])
                ]
            first += len(row.token_ids)
        return parts


def _sent(parts: LogprobTensors) -> LogprobTensors:
    """On their way to the host; what the device holds is free again once they are there."""
    return LogprobTensors(
        parts.token_ids.to("cpu", non_blocking=True),
        parts.logprobs.to("cpu", non_blocking=True),
        parts.ranks.to("cpu", non_blocking=True),
    )
