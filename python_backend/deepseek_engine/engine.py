"""The engine: requests in, tokens and text out, one step at a time. Not thread-safe: one thread runs it."""

import logging
import secrets
import time
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Protocol

from piccard_contract.errors import ErrorCode, RequestError

from deepseek_engine.block_pool import BlockPool
from deepseek_engine.choice import Choice, Finish
from deepseek_engine.departures import Departures, StepGivenUpError
from deepseek_engine.failures import breaks_the_device, device_cause, is_out_of_memory
from deepseek_engine.pacing import PrefillPacer
from deepseek_engine.pipeline import Pipeline
from deepseek_engine.prefix_cache import PrefixCache
from deepseek_engine.queue_policy import QueuePolicy, queue_rank
from deepseek_engine.request import EngineError, EngineOutput, EngineRequest, EngineStats
from deepseek_engine.runners.base import ModelRunner
from deepseek_engine.scheduler import Scheduler, Share
from deepseek_engine.sequence import Sequence, SequenceStatus
from deepseek_engine.settings import EngineSettings
from deepseek_engine.step_plan import LAST_SAMPLED, NewSequence, StepPlan, StepResult, StepRow

if TYPE_CHECKING:
    from deepseek_engine.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


class EngineBackend(Protocol):
    """What a server needs of an engine, ours or another's."""

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises RequestError for the client's faults."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request; unknown and finished ones are ignored."""
        ...

    def step(self, departures: Departures | None = None) -> list[EngineOutput]:
        """Get on by one step and return what was produced; a step's results may come with a later call.

        Args:
            departures: requests whose abort is on its way; a step for none but them may be given up.
        """
        ...

    def has_work(self) -> bool:
        """Whether another step would do or tell something."""
        ...

    def stats(self) -> EngineStats:
        """Gauges and counters."""
        ...


class Engine:
    """Schedules requests over one model runner.

    Where the runner takes two steps at once, the next one is started before the last one's tokens are here. So a
    sequence may turn out to have ended when a step that goes on with it has been started: what that brings is dropped.

    Args:
        runner: executes steps; owns weights and cache.
        tokenizer: the checkpoint's.
        settings: budgets and limits.
        clock: seconds, monotonic.

    Raises:
        ValueError: settings that model and cache cannot meet.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: "Tokenizer",
        settings: EngineSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_model_len = settings.context_for(runner.max_position_embeddings, runner.num_blocks)
        self._runner = runner
        self._settings = settings
        self._tokenizer = tokenizer
        self._pool = BlockPool(runner.num_blocks, runner.block_size)
        self._prefix_cache = (
            PrefixCache(self._pool, runner.cache_format, settings.adapter) if settings.enable_prefix_caching else None
        )
        self._pacer = PrefillPacer(settings.prefill_chunk, settings.block_size, settings.prefill_gap)
        self._scheduler = Scheduler(settings, self._pool, self._prefix_cache, self._pacer)
        self._pipeline = Pipeline(runner)
        own_eos = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        # A tokenizer may name ids beyond the model's vocabulary; they cannot be sampled, nor masked.
        self._eos_ids = tuple(sorted(i for i in {*runner.eos_token_ids, *own_eos} if i < runner.vocab_size))
        self._eos_set = frozenset(self._eos_ids)
        self._ids = count()
        self._requests: dict[str, dict[int, Choice]] = {}
        self._known: set[int] = set()
        self._finished: list[int] = []
        self._outputs: list[EngineOutput] = []
        self._generated_tokens = 0
        self._prompt_tokens = 0
        self._clock = clock
        self._queue = QueuePolicy(settings.max_num_waiting, settings.max_queue_seconds)
        self._refused = 0
        self._nobody = Departures()

    def add(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: INVALID_VALUE, MISSING_INPUT, INVALID_TOKEN or CONTEXT_LENGTH_EXCEEDED, saying what to change;
                OVERLOADED where queue or cache are full. A request that was begun elsewhere is always taken.
        """
        self._check(request)
        if not request.output_ids:
            self._check_room(request)
        sequences = self._sequences(request)
        choices = {sequence.choice: Choice(sequence, self._tokenizer, self._eos_set) for sequence in sequences}
        self._requests[request.id] = choices
        self._prompt_tokens += len(request.prompt_ids)
        for choice in choices.values():
            self._scheduler.add(choice.sequence)
        # Tokens generated elsewhere may have ended the text already.
        for choice in [choice for choice in choices.values() if choice.finish is not None]:
            self._end(choice, choice.output([], choice.owed))

    def abort(self, request_id: str) -> None:
        """End a request's choices with reason "abort", told by the next step; unknown and finished ones are ignored."""
        for choice in list(self._requests.get(request_id, {}).values()):
            choice.finish = Finish("abort")
            self._end(choice, choice.output([], choice.held_text()))

    def has_work(self) -> bool:
        """Whether another step would run or tell something."""
        return bool(self._requests or self._outputs or self._pipeline)

    def step(self, departures: Departures | None = None) -> list[EngineOutput]:
        """Start as many steps as the runner takes, wait for the oldest, and return what it and aborts produced."""
        self._give_up_overdue()
        while self._pipeline.has_room:
            shares = self._scheduler.schedule()
            if not shares or not self._start(shares, departures or self._nobody):
                break
        if self._pipeline:
            self._collect()
        outputs, self._outputs = self._outputs, []
        return outputs

    def stats(self) -> EngineStats:
        """Gauges and counters."""
        return EngineStats(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            free_blocks=self._pool.num_available,
            total_blocks=self._pool.num_blocks,
            cached_blocks=self._pool.num_idle,
            prefix_hit_tokens=0 if self._prefix_cache is None else self._prefix_cache.hit_tokens,
            preemptions=self._scheduler.num_preemptions,
            generated_tokens=self._generated_tokens,
            prompt_tokens=self._prompt_tokens,
            pressure=self._scheduler.pressure.level,
            refused=self._refused,
            load=self._load(),
        )

    def _load(self) -> float:
        settings, waiting = self._settings, len(self._scheduler.waiting)
        return min(
            1.0,
            max(
                len(self._scheduler.running) / settings.max_num_seqs,
                self._pool.num_referenced / self._pool.num_blocks,
                waiting / settings.max_num_waiting,
            ),
        )

    def preempt(self, request_id: str) -> None:
        """Take the cache blocks of a request's running choices; they recompute when there is room."""
        for choice in self._requests.get(request_id, {}).values():
            if choice.sequence.status is SequenceStatus.RUNNING:
                self._scheduler.preempt(choice.sequence)

    def _check(self, request: EngineRequest) -> None:
        params = request.params
        if request.id in self._requests:
            raise RequestError(ErrorCode.INVALID_VALUE, f"request id {request.id} is running already; use another one")
        if not request.prompt_ids:
            raise RequestError(ErrorCode.MISSING_INPUT, "the prompt has no tokens; send at least one")
        if request.output_ids and params.n > 1:
            raise RequestError(ErrorCode.INVALID_VALUE, "output_ids resumes one choice; set n to 1")
        self._check_tokens("the prompt", request.prompt_ids)
        self._check_tokens("output_ids", request.output_ids)
        self._check_tokens("stop_token_ids", params.stop_token_ids)
        self._check_tokens("logit_bias", list(params.logit_bias))
        self._check_length(request)

    def _check_room(self, request: EngineRequest) -> None:
        self._scheduler.observe_pressure()
        try:
            self._queue.check(len(self._scheduler.waiting), request.params.n)
            self._scheduler.pressure.check(len(request.prompt_ids), self._queue.retry_after)
        except RequestError:
            self._refused += 1
            raise

    def _give_up_overdue(self) -> None:
        """Fail the requests none of whose choices has run and which have waited too long."""
        now = self._clock()
        late = {
            sequence.request_id: None
            for sequence in self._scheduler.waiting
            if sequence.choice == 0 and not sequence.started and self._queue.is_overdue(now - sequence.arrived)
        }
        for request_id in late:
            self._refused += 1
            for choice in list(self._requests[request_id].values()):
                self._fail(choice, self._queue.overdue())

    def _check_tokens(self, name: str, token_ids: list[int]) -> None:
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._runner.vocab_size:
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < self._runner.vocab_size)
            raise RequestError(
                ErrorCode.INVALID_TOKEN,
                f"{name} has token id {wrong}; the vocabulary has ids 0 to {self._runner.vocab_size - 1}",
            )

    def _check_length(self, request: EngineRequest) -> None:
        num_prompt, max_tokens = len(request.prompt_ids), request.params.max_tokens
        if num_prompt + (max_tokens or 1) > self.max_model_len:
            raise RequestError(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"the prompt's {num_prompt} tokens and max_tokens {max_tokens or 1} are more than the context of "
                f"{self.max_model_len}; shorten the prompt or lower max_tokens",
            )
        if len(request.output_ids) > self._max_output(request):
            raise RequestError(
                ErrorCode.INVALID_VALUE,
                f"output_ids has {len(request.output_ids)} tokens, more than the {self._max_output(request)} that "
                "may be generated; raise max_tokens, which counts them too",
            )

    def _max_output(self, request: EngineRequest) -> int:
        return request.params.max_tokens or self.max_model_len - len(request.prompt_ids)

    def _sequences(self, request: EngineRequest) -> list[Sequence]:
        params = request.params
        # An unseeded request gets a seed of its own, so that its stream can be told again too.
        seed = secrets.randbits(64) if params.fixed_seed is None else params.fixed_seed
        arrived, expected = self._clock(), len(request.prompt_ids) + self._max_output(request)
        rank = queue_rank(arrived, request.priority, expected)
        sequences: list[Sequence] = []
        for choice in range(params.n):
            sequence = Sequence(
                id=next(self._ids),
                request_id=request.id,
                choice=choice,
                params=params,
                token_ids=request.prompt_ids + request.output_ids,
                num_prompt=len(request.prompt_ids),
                num_resumed=len(request.output_ids),
                max_output=self._max_output(request),
                seed=seed,
                priority=request.priority,
                rank=rank,
                arrived=arrived,
                salt=request.salt,
                parent=sequences[0] if sequences else None,
            )
            sequence.logprobs_from, sequence.logprobs_to = _known_logprobs(sequence)
            sequences.append(sequence)
        return sequences

    def _start(self, shares: list[Share], departures: Departures) -> bool:
        """Start a step; False where it failed, with its requests, or was given up."""
        plan = self._plan(shares)
        try:
            with departures.interrupting(frozenset(share.sequence.request_id for share in shares)) as interrupt:
                self._pipeline.start(shares, plan, interrupt)
        except StepGivenUpError:
            # The cache holds a part of it, which counts for nothing; whoever is still here after all runs it again.
            for share in shares:
                self._scheduler.withdraw(share)
            return False
        # Whatever a model raises ends the requests of the step and nothing else, while another step can be run.
        except Exception as error:
            if breaks_the_device(error):
                raise
            # What was started before is sound, and tells its tokens first.
            while self._pipeline:
                self._collect()
            self._fail_all(shares, error)
            return False
        return True

    def _collect(self) -> None:
        """Take the results of the oldest step under way."""
        step = self._pipeline.pop()
        try:
            result, seconds = self._pipeline.collect(step)
        except Exception as error:
            if breaks_the_device(error):
                raise
            self._fail_all(step.shares, error)
        else:
            self._take(step.shares, result)
            self._observe(step.shares, seconds)

    def _plan(self, shares: list[Share]) -> StepPlan:
        finished, self._finished = self._finished, []
        new = [share.sequence for share in shares if share.sequence.id not in self._known]
        self._known.update(sequence.id for sequence in new)
        for sequence in new:
            self._queue.began(self._clock() - sequence.arrived)
        return StepPlan(
            rows=[_row(share) for share in shares], new=[self._new(sequence) for sequence in new], finished=finished
        )

    def _new(self, sequence: Sequence) -> NewSequence:
        return NewSequence(
            sequence_id=sequence.id,
            params=sequence.params,
            prompt_ids=sequence.token_ids[: sequence.num_prompt],
            output_ids=sequence.token_ids[sequence.num_prompt :],
            choice=sequence.choice,
            eos_ids=self._eos_ids,
            seed=sequence.seed,
        )

    def _take(self, shares: list[Share], result: StepResult) -> None:
        errors, prompt_logprobs, logprobs = result.errors, result.prompt_logprobs, result.logprobs
        for index, share in enumerate(shares):
            sequence = share.sequence
            # It has ended since the step was started; another request may have its name by now.
            if sequence.status is SequenceStatus.FINISHED:
                continue
            choice = self._requests[sequence.request_id][sequence.choice]
            if errors and index in errors:
                self._fail(choice, EngineError(ErrorCode.NUMERICAL_ERROR, errors[index]))
                continue
            self._scheduler.advance(share)
            if prompt_logprobs and index in prompt_logprobs:
                choice.take_known(prompt_logprobs[index])
                sequence.logprobs_from += len(prompt_logprobs[index].ranks)
            if share.reaches_end:
                output = choice.take(result.token_ids[index], logprobs.get(index))
                self._generated_tokens += len(output.token_ids)
                if choice.finish is None:
                    self._outputs.append(output)
                else:
                    self._end(choice, output)

    def _end(self, choice: Choice, output: EngineOutput) -> None:
        """Take a choice out and tell its last output."""
        sequence = choice.sequence
        self._scheduler.finish(sequence)
        if sequence.id in self._known:
            self._known.discard(sequence.id)
            self._finished.append(sequence.id)
        choices = self._requests[sequence.request_id]
        del choices[sequence.choice]
        if not choices:
            del self._requests[sequence.request_id]
        self._outputs.append(output)

    def _fail(self, choice: Choice, error: EngineError) -> None:
        self._scheduler.distrust(choice.sequence)
        choice.finish = Finish("error")
        # What the text holds back stays untold: another version that goes on after these tokens tells it.
        output = choice.output([], "")
        output.error = error
        self._end(choice, output)

    def _fail_all(self, shares: list[Share], error: Exception) -> None:
        _log.error("step of %d sequences failed", len(shares), exc_info=error)
        # The text is for the log: it may tell of other requests. What CUDA says does not.
        if is_out_of_memory(error):
            code, message = (
                ErrorCode.OUT_OF_MEMORY,
                "the version ran out of memory in a step; send fewer or shorter requests",
            )
        else:
            told = device_cause(error)
            cause = type(error).__name__ if told is None else f"CUDA: {told}"
            code, message = ErrorCode.INTERNAL, f"a step failed ({cause}); the version's log has the details"
        for share in shares:
            sequence = share.sequence
            if sequence.status is not SequenceStatus.FINISHED:
                self._fail(self._requests[sequence.request_id][sequence.choice], EngineError(code, message))

    def _observe(self, shares: list[Share], seconds: float) -> None:
        counts = [share.count for share in shares]
        num_decodes = counts.count(1)
        self._pacer.observe(num_decodes, sum(counts) - num_decodes, seconds)


def _row(share: Share) -> StepRow:
    sequence = share.sequence
    start, stop = share.start, share.start + share.count
    token_ids = sequence.token_ids[start:stop]
    if len(token_ids) < share.count:
        token_ids.append(LAST_SAMPLED)
    wanted = None
    if sequence.logprobs_from < sequence.logprobs_to:
        wanted = range(max(sequence.logprobs_from, start + 1), min(sequence.logprobs_to, stop + 1)) or None
    return StepRow(sequence.id, token_ids, start, sequence.block_table, share.reaches_end, wanted)


def _known_logprobs(sequence: Sequence) -> tuple[int, int]:
    """Positions of known tokens whose log-probabilities are wanted, as a half-open range.

    Of the prompt where asked for, told by the first choice alone; of the tokens generated elsewhere for the sum.
    """
    if sequence.num_resumed:
        return (sequence.num_prompt, len(sequence.token_ids)) if sequence.params.logprobs is not None else (0, 0)
    wanted = sequence.params.prompt_logprobs is not None and sequence.choice == 0
    return (1, sequence.num_prompt) if wanted else (0, 0)
