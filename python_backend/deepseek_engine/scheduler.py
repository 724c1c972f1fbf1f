"""Continuous batching: chooses what each step runs, under one token budget for decodes and prefill chunks."""

from bisect import bisect_left, insort
from dataclasses import dataclass
from operator import attrgetter

from deepseek_engine.block_pool import BlockPool
from deepseek_engine.memory_pressure import MemoryPressure, Pressure
from deepseek_engine.pacing import PrefillPacer
from deepseek_engine.prefix_cache import PrefixCache
from deepseek_engine.sequence import Sequence, SequenceStatus
from deepseek_engine.settings import EngineSettings

_order = attrgetter("order")


@dataclass(slots=True)
class Share:
    """A sequence's share of a step: the next tokens of it that no step has run.

    Attributes:
        start: position of the first of them.
        count: how many.
        reaches_end: whether its last token is run, which may be pending, so that the next can be sampled.
    """

    sequence: Sequence
    start: int
    count: int
    reaches_end: bool


class Scheduler:
    """Decides by rank (`queue_policy.queue_rank`), then arrival.

    Every running sequence that decodes has its token in every step; what is left of the budget goes to prompts, oldest
    first, at most `PrefillPacer.chunk` of it while others decode, so that a long prompt never stalls a stream. A prompt
    is admitted when the pool holds all its tokens. A decode that finds no block takes those of the worst running
    sequence (the last by rank, then arrival), which later recomputes. `memory_pressure.Pressure` says what else is done
    when the cache fills up.

    A step may be scheduled before the last one's results are known: each of its rows that samples counts as one more
    token, and what it computes as computed. Nothing else is taken for granted: others share only what is in the cache
    for certain, and a preempted sequence waits for its steps under way, which still tell their tokens.

    Args:
        settings: budgets.
        pool: the cache's blocks.
        prefix_cache: None runs without prefix sharing.
        pacer: None keeps `settings.prefill_chunk`.
    """

    def __init__(
        self,
        settings: EngineSettings,
        pool: BlockPool,
        prefix_cache: PrefixCache | None = None,
        pacer: PrefillPacer | None = None,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._prefix_cache = prefix_cache
        self._pacer = pacer or PrefillPacer(settings.prefill_chunk, settings.block_size, None)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.pressure = MemoryPressure(pool.num_blocks * pool.block_size)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        insort(self.waiting, sequence, key=_order)

    def schedule(self) -> list[Share]:
        """The next step, decodes first; from now on it counts as under way.

        Empty only when nothing is waiting or running but what steps under way hold up.
        """
        level = self.observe_pressure()
        if level >= Pressure.TIGHT:
            self._pool.drop_idle()
        if level >= Pressure.SCARCE:
            self._yield_to_better()
        shares = self._schedule_decodes()
        budget = self._settings.max_num_batched_tokens - len(shares)
        if shares:
            budget = min(budget, self._pacer.chunk())
        if level >= Pressure.TIGHT:
            budget = -(-budget // 2)
        budget = self._schedule_prefills(shares, budget)
        self._admit(shares, budget)
        return shares

    def observe_pressure(self) -> Pressure:
        """The level of the cache as it is now."""
        self.pressure.observe(self._pool.num_referenced / self._pool.num_blocks)
        return self.pressure.level

    def advance(self, share: Share) -> None:
        """Record that a share's step is done; in the cache it left nothing where the sequence was preempted since."""
        self.withdraw(share)
        sequence = share.sequence
        if sequence.status is not SequenceStatus.RUNNING:
            return
        sequence.num_computed += share.count
        if self._prefix_cache is not None:
            self._prefix_cache.publish(sequence)

    def withdraw(self, share: Share) -> None:
        """Record that a share is under way no longer; unless it is done, its tokens are scheduled again."""
        share.sequence.num_under_way -= share.count
        share.sequence.num_pending -= share.reaches_end

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands, and give its blocks back."""
        if sequence.status is SequenceStatus.FINISHED:
            return
        _remove(self.running if sequence.status is SequenceStatus.RUNNING else self.waiting, sequence)
        self._pool.release(sequence.block_table)
        sequence.status = SequenceStatus.FINISHED

    def distrust(self, sequence: Sequence) -> None:
        """Let nobody share the sequence's blocks, those it has lost included, since what is in them may be broken."""
        if self._prefix_cache is not None:
            self._prefix_cache.forget(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks; it waits at its old place and recomputes."""
        _remove(self.running, sequence)
        self._pool.release(sequence.block_table)
        sequence.num_computed = 0
        sequence.num_published = 0
        sequence.status = SequenceStatus.WAITING
        self.num_preemptions += 1
        self.add(sequence)

    def _schedule_decodes(self) -> list[Share]:
        shares: list[Share] = []
        for sequence in list(self.running):
            if sequence.num_remaining == 1 and not sequence.ends_under_way and self._make_room(sequence):
                shares.append(_share(sequence, 1))
        return shares

    def _make_room(self, sequence: Sequence) -> bool:
        """Reserve a decode's slot, at the price of worse sequences and in the end of itself."""
        if sequence.status is not SequenceStatus.RUNNING:
            return False
        needed = len(sequence.token_ids) + sequence.num_pending
        # Its last block has a place left in nearly every step.
        if needed <= len(sequence.block_table) * self._pool.block_size:
            return True
        while not self._pool.reserve(sequence.block_table, needed):
            victim = self.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def _yield_to_better(self) -> None:
        """Make room for the first that waits, at the price of running ones of a worse priority that come after it."""
        if not self.waiting:
            return
        first = self.waiting[0]
        lesser = [other for other in self.running if other.priority > first.priority and other.order > first.order]
        needed = self._pool.blocks_for(len(first.token_ids))
        while lesser and needed + len(self.running) > self._pool.num_available:
            self.preempt(lesser.pop())

    def _schedule_prefills(self, shares: list[Share], budget: int) -> int:
        for sequence in self.running:
            if budget == 0:
                break
            if sequence.num_remaining > 1:
                count = min(sequence.num_remaining, budget)
                shares.append(_share(sequence, count))
                budget -= count
        return budget

    def _admit(self, shares: list[Share], budget: int) -> None:
        admitted: list[Sequence] = []
        for sequence in self.waiting:
            if budget == 0 or len(self.running) + len(admitted) == self._settings.max_num_seqs:
                break
            if sequence.num_under_way:
                # It was preempted and will be back at the next step; nobody takes its place meanwhile.
                break
            if _awaits_parent(sequence):
                continue
            if not self._reserve_all(sequence, len(self.running) + len(admitted)):
                break
            count = min(sequence.num_remaining, budget)
            shares.append(_share(sequence, count))
            budget -= count
            sequence.status = SequenceStatus.RUNNING
            admitted.append(sequence)
        for sequence in admitted:
            _remove(self.waiting, sequence)
            insort(self.running, sequence, key=_order)

    def _reserve_all(self, sequence: Sequence, num_running: int) -> bool:
        """Give a waiting sequence blocks for all its tokens, shared ones where they are known.

        A block is left over for each running sequence to grow into; else the newcomer would soon be preempted.
        """
        table = sequence.block_table
        shared = self._known_blocks(sequence)
        self._pool.share(table, shared)
        needed = self._pool.blocks_for(len(sequence.token_ids)) - len(table)
        if needed + num_running > self._pool.num_available:
            self._pool.release(table)
            return False
        self._pool.reserve(table, len(sequence.token_ids))
        sequence.num_computed = len(shared) * self._pool.block_size
        if not sequence.started:
            sequence.num_cached = sequence.num_computed
            if self._prefix_cache is not None:
                self._prefix_cache.hit_tokens += sequence.num_computed
            sequence.started = True
        return True

    def _known_blocks(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the sequence's beginning: of the prefix cache, or of the choice it was forked from."""
        limit = max(sequence.reusable, 0)
        blocks = self._prefix_cache.match(sequence, limit) if self._prefix_cache is not None else []
        parent = sequence.parent
        if parent is None or parent.status is not SequenceStatus.RUNNING:
            return blocks
        usable = min(limit, sequence.num_prompt, parent.num_computed) // self._pool.block_size
        return blocks if len(blocks) >= usable else parent.block_table[:usable]


def _share(sequence: Sequence, count: int) -> Share:
    """The sequence's next `count` tokens, under way from now on."""
    start = sequence.num_computed + sequence.num_under_way
    share = Share(sequence, start, count, start + count == len(sequence.token_ids) + sequence.num_pending)
    sequence.num_under_way += count
    sequence.num_pending += share.reaches_end
    return share


def _awaits_parent(sequence: Sequence) -> bool:
    """Whether the prompt is being computed by the request's first choice, whose blocks will be shared."""
    parent = sequence.parent
    return parent is not None and parent.status is SequenceStatus.RUNNING and parent.num_computed < sequence.num_prompt


def _remove(ordered: list[Sequence], sequence: Sequence) -> None:
    del ordered[bisect_left(ordered, sequence.order, key=_order)]
