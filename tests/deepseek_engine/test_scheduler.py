"""The scheduler alone: budgets, fairness, preemption and the books of the pool, over sequences that only count."""

from collections import deque

import pytest
from deepseek_engine.block_pool import BlockPool
from deepseek_engine.prefix_cache import PrefixCache
from deepseek_engine.scheduler import Scheduler
from deepseek_engine.sequence import Sequence, SequenceStatus
from deepseek_engine.settings import EngineSettings
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from piccard_contract.sampling import SamplingParams

PARAMS = SamplingParams()


class Harness:
    """Runs a scheduler; each sequence that reaches its end gets one more token until it has enough.

    Of `steps_in_flight` steps the oldest is done once as many are under way, or nothing else can be.
    """

    def __init__(self, num_blocks=32, caching=True, steps_in_flight=1, **changes):
        self.settings = EngineSettings(
            num_blocks=num_blocks, **{"max_num_seqs": 4, "max_num_batched_tokens": 64, "prefill_chunk": 32, **changes}
        )
        self.pool = BlockPool(num_blocks, self.settings.block_size)
        self.cache = PrefixCache(self.pool, "format") if caching else None
        self.scheduler = Scheduler(self.settings, self.pool, self.cache)
        self.steps_in_flight = steps_in_flight
        self.under_way = deque()
        self.live = []
        self.count = 0

    def add(self, prompt, output=4, priority=0, salt="", parent=None):
        sequence = Sequence(
            self.count,
            "r",
            0,
            PARAMS,
            list(prompt),
            len(prompt),
            output,
            0,
            priority=priority,
            rank=priority,
            salt=salt,
            parent=parent,
        )
        self.count += 1
        self.scheduler.add(sequence)
        self.live.append(sequence)
        return sequence

    def step(self):
        decoding = {sequence.id for sequence in self.scheduler.running if sequence.num_remaining == 1}
        shares = self.scheduler.schedule()
        self.check(shares, decoding)
        if shares:
            self.under_way.append(shares)
        if len(self.under_way) == self.steps_in_flight or (self.under_way and not shares):
            self.done(self.under_way.popleft())
        return shares

    def done(self, shares):
        for share in shares:
            if share.sequence.status is SequenceStatus.FINISHED:
                continue
            self.scheduler.advance(share)
            if share.reaches_end:
                share.sequence.token_ids.append(share.sequence.id)
            if share.sequence.num_output >= share.sequence.max_output:
                self.finish(share.sequence)

    def check(self, shares, decoding):
        total = sum(share.count for share in shares)
        decodes = [share for share in shares if share.sequence.id in decoding]
        assert total <= self.settings.max_num_batched_tokens
        assert len({share.sequence.id for share in shares}) == len(shares)
        assert len(self.scheduler.running) <= self.settings.max_num_seqs
        assert all(share.count >= 1 for share in shares)
        if decodes:
            assert total - len(decodes) <= self.settings.prefill_chunk
        for share in shares:
            sequence = share.sequence
            assert sequence.status is SequenceStatus.RUNNING
            covered = len(sequence.block_table) * self.settings.block_size
            assert covered >= share.start + share.count
            # All that is under way, this step included.
            for place in range(sequence.num_computed, share.start + share.count):
                block = sequence.block_table[place // self.settings.block_size]
                assert self.pool.references(block) == 1
                assert block not in self.pool._key_of

    def finish(self, sequence):
        self.scheduler.finish(sequence)
        self.live.remove(sequence)

    def drain(self, limit=2000):
        for steps in range(limit):
            if not self.live:
                return steps
            held_up = bool(self.under_way)
            shares = self.step()
            assert shares or held_up, "work is left but nothing is scheduled"
        raise AssertionError("the work does not end")

    def check_books(self):
        owners = [block for sequence in self.live for block in sequence.block_table]
        for block in range(self.pool.num_blocks):
            assert self.pool.references(block) == owners.count(block)
        assert self.pool.num_free + self.pool.num_idle + self.pool.num_referenced == self.pool.num_blocks


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, steps, aborts and preempts in any order."""

    steps_in_flight = 1

    def __init__(self):
        super().__init__()
        self.harness = Harness(num_blocks=12, steps_in_flight=self.steps_in_flight)

    @rule(
        length=st.integers(1, 100),
        flavour=st.integers(0, 1),
        output=st.integers(1, 60),
        priority=st.integers(0, 2),
    )
    def add(self, length, flavour, output, priority):
        self.harness.add([flavour] * length, output, priority)

    @rule(length=st.integers(1, 100), output=st.integers(1, 40), choices=st.integers(2, 3))
    def add_choices(self, length, output, choices):
        parent = self.harness.add(range(length), output)
        for _ in range(choices - 1):
            self.harness.add(range(length), output, parent=parent)

    @rule()
    def step(self):
        held_up = bool(self.harness.under_way)
        shares = self.harness.step()
        assert shares or held_up or not self.harness.live

    @precondition(lambda self: self.harness.live)
    @rule(data=st.data())
    def abort(self, data):
        sequence = data.draw(st.sampled_from(self.harness.live), label="aborted")
        self.harness.finish(sequence)
        self.harness.scheduler.finish(sequence)

    @precondition(lambda self: self.harness.scheduler.running)
    @rule(data=st.data())
    def preempt(self, data):
        self.harness.scheduler.preempt(data.draw(st.sampled_from(self.harness.scheduler.running), label="preempted"))

    @invariant()
    def books_balance(self):
        self.harness.check_books()

    @invariant()
    def queues_are_in_order(self):
        for queue in (self.harness.scheduler.waiting, self.harness.scheduler.running):
            assert [sequence.order for sequence in queue] == sorted(sequence.order for sequence in queue)
        assert all(sequence.block_table == [] for sequence in self.harness.scheduler.waiting)

    def teardown(self):
        self.harness.drain()
        assert self.harness.pool.num_available == self.harness.pool.num_blocks


class TwoStepsMachine(SchedulerMachine):
    """The same with two steps under way."""

    steps_in_flight = 2


SETTINGS = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = SETTINGS
TestTwoSteps = TwoStepsMachine.TestCase
TestTwoSteps.settings = SETTINGS


@settings(deadline=None, max_examples=60)
@given(
    prompts=st.lists(st.integers(1, 120), min_size=1, max_size=12),
    seats=st.integers(1, 6),
    budget=st.integers(6, 80),
    chunk=st.integers(1, 64),
)
def test_everything_ends_within_the_budgets(prompts, seats, budget, chunk):
    harness = Harness(num_blocks=16, max_num_seqs=seats, max_num_batched_tokens=budget, prefill_chunk=chunk)
    for place, length in enumerate(prompts):
        harness.add([place] * length, output=5)
    harness.drain()
    assert harness.pool.num_available == 16


@settings(deadline=None, max_examples=30)
@given(chunk=st.integers(8, 64), length=st.integers(100, 1500))
def test_running_streams_get_a_token_in_every_step_while_a_long_prompt_arrives(chunk, length):
    harness = Harness(num_blocks=512, max_num_seqs=9, prefill_chunk=chunk, max_num_batched_tokens=64)
    streams = [harness.add([place] * 10, output=10_000) for place in range(8)]
    while any(stream.num_output == 0 for stream in streams):
        harness.step()
    prompt = harness.add([99] * length, output=2)
    steps = 0
    while prompt.num_output == 0:
        before = [stream.num_output for stream in streams]
        harness.step()
        assert [stream.num_output for stream in streams] == [count + 1 for count in before]
        steps += 1
    assert steps == -(-length // min(chunk, 64 - 8))


def test_a_prompt_alone_takes_the_whole_budget():
    harness = Harness(prefill_chunk=8)
    harness.add([1] * 100)
    assert [share.count for share in harness.step()] == [64]
    assert [share.count for share in harness.step()] == [36]


def test_lower_priority_values_go_first_and_equals_by_arrival():
    harness = Harness(max_num_seqs=1)
    names = {harness.add([place] * 4, priority=priority).id: place for place, priority in enumerate([1, 0, 1, 0, -1])}
    order = []
    while harness.live:
        shares = harness.step()
        for share in shares:
            if names[share.sequence.id] not in order:
                order.append(names[share.sequence.id])
    assert order == [4, 1, 3, 0, 2]


def test_the_worst_is_preempted_and_all_end():
    # Two sequences of 5 blocks each when they end, in a pool of 8.
    harness = Harness(num_blocks=8, caching=False)
    important = harness.add([1] * 40, output=40, priority=0)
    lesser = harness.add([2] * 40, output=40, priority=1)
    while harness.scheduler.num_preemptions == 0:
        harness.step()
    assert lesser.status is SequenceStatus.WAITING
    assert (lesser.block_table, lesser.num_computed) == ([], 0)
    assert important.status is SequenceStatus.RUNNING
    harness.drain()
    assert (important.num_output, lesser.num_output) == (40, 40)


def test_a_prompt_is_not_admitted_before_it_fits_whole():
    harness = Harness(num_blocks=8, caching=False)
    harness.add([1] * 60, output=5)
    harness.step()
    late = harness.add([2] * 100, output=1)
    harness.step()
    assert late.status is SequenceStatus.WAITING
    harness.drain()
    assert harness.scheduler.num_preemptions == 0


@pytest.mark.parametrize(("length", "cached", "steps"), [(465, 256, [209]), (256, 256, [16]), (257, 256, [1])])
def test_a_cached_prefix_is_counted_once_and_the_last_token_is_computed(length, cached, steps):
    harness = Harness(num_blocks=64, max_num_batched_tokens=512)
    first = harness.add(range(cached), output=1)
    harness.drain()
    assert first.num_computed == cached
    second = harness.add(range(length), output=1)
    counts = []
    while harness.live:
        shares = harness.step()
        counts.extend(share.count for share in shares)
    assert counts == steps
    assert second.num_computed == length
    assert second.num_cached == length - steps[0]
    assert harness.cache.hit_tokens == second.num_cached


@pytest.mark.parametrize("caching", [True, False])
def test_choices_wait_for_the_first_and_share_its_full_prompt_blocks(caching):
    harness = Harness(num_blocks=64, caching=caching)
    parent = harness.add(range(100), output=50)
    child = harness.add(range(100), output=50, parent=parent)
    while parent.num_output == 0:
        harness.step()
        assert child.status is SequenceStatus.WAITING
    shares = harness.step()
    assert [(share.sequence, share.count) for share in shares] == [(parent, 1), (child, 4)]
    assert child.block_table[:6] == parent.block_table[:6]
    assert child.block_table[6] != parent.block_table[6]
    harness.check_books()


def test_a_choice_whose_parent_is_gone_computes_its_prompt_itself():
    harness = Harness(caching=False)
    parent = harness.add(range(50), output=50)
    child = harness.add(range(50), output=3, parent=parent)
    harness.step()
    harness.finish(parent)
    harness.drain()
    assert child.num_output == 3


def test_distrusted_blocks_are_not_shared():
    harness = Harness()
    broken = harness.add(range(64), output=1)
    harness.scheduler.advance(harness.scheduler.schedule()[0])
    harness.scheduler.distrust(broken)
    harness.finish(broken)
    assert harness.pool.num_idle == 0
    again = harness.add(range(64), output=1)
    harness.drain()
    assert again.num_cached == 0


def test_a_sequence_that_has_its_last_token_pending_is_not_scheduled_again():
    harness = Harness(steps_in_flight=2)
    ends, goes_on = harness.add([1] * 4, output=2), harness.add([2] * 4, output=3)
    counts = [[(share.sequence.id, share.start) for share in harness.step()] for _ in range(4)]
    assert counts[0] == [(ends.id, 0), (goes_on.id, 0)]
    assert counts[1] == [(ends.id, 4), (goes_on.id, 4)]
    assert counts[2:] == [[(goes_on.id, 5)], []]
    assert (ends.num_output, goes_on.num_output) == (2, 3)


def test_room_is_made_for_the_pending_token_too():
    harness = Harness(steps_in_flight=2)
    sequence = harness.add([1] * 16, output=9)
    for _ in range(2):
        (share,) = harness.step()
    assert (share.start, len(sequence.token_ids), len(sequence.block_table)) == (16, 17, 2)


def test_what_is_under_way_is_shared_with_nobody():
    harness = Harness(num_blocks=64, steps_in_flight=2, max_num_batched_tokens=512, prefill_chunk=512)
    parent = harness.add(range(100), output=50)
    child = harness.add(range(100), output=50, parent=parent)
    harness.step()
    assert harness.pool.find(parent.block_keys[0] if parent.block_keys else b"") is None
    twin = harness.add(range(100), output=50)
    shares = harness.step()
    assert [(share.sequence, share.start) for share in shares] == [(parent, 100), (twin, 0)]
    assert (twin.num_cached, child.status) == (0, SequenceStatus.WAITING)
    shares = harness.step()
    assert [(share.sequence, share.start) for share in shares] == [(parent, 101), (twin, 100), (child, 96)]


def test_a_preempted_sequence_waits_for_its_step_and_nobody_takes_its_place():
    harness = Harness(steps_in_flight=2)
    first = harness.add([1] * 20, output=9)
    harness.step()
    harness.scheduler.preempt(first)
    other = harness.add([2] * 20, output=9)
    assert harness.step() == []
    # Its token is here and it starts anew, with nothing that it had: its blocks were gone before they were certain.
    assert (first.num_output, first.num_computed) == (1, 0)
    assert [(share.sequence, share.start, share.count) for share in harness.step()] == [(first, 0, 21), (other, 0, 20)]


def test_blocks_that_were_lost_before_a_failure_are_distrusted_too():
    harness = Harness(steps_in_flight=2, max_num_batched_tokens=32)
    broken = harness.add(range(64), output=1)
    harness.step()
    harness.step()
    assert (broken.num_computed, broken.num_under_way) == (32, 32)
    harness.scheduler.preempt(broken)
    assert harness.pool.num_idle == 2
    harness.scheduler.distrust(broken)
    harness.finish(broken)
    assert harness.pool.num_idle == 0
