"""Whatever the order of add, step, abort and preempt: texts are right, blocks balance, and everything ends."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from piccard_contract.errors import ErrorCode, RequestError
from toy_model import ToyModel, collect, drain, generate, toy_engine, toy_request

BLOCKS = 14
POISON = 259


class EngineMachine(RuleBasedStateMachine):
    """An engine with a pool that is too small, and requests that break, end early or are taken away."""

    steps_in_flight = 1

    def __init__(self):
        super().__init__()
        self.engine = toy_engine(
            ToyModel(poison=POISON),
            steps_in_flight=self.steps_in_flight,
            num_blocks=BLOCKS,
            max_model_len=160,
            max_num_seqs=4,
            max_num_batched_tokens=24,
            prefill_chunk=16,
        )
        self.requests = {}
        self.aborted = set()
        self.outputs = []

    @rule(
        length=st.integers(1, 90),
        tokens=st.integers(1, 60),
        seed=st.integers(0, 3),
        choices=st.sampled_from([1, 1, 1, 2, 3]),
        poisoned=st.sampled_from([False] * 5 + [True]),
        priority=st.integers(0, 1),
    )
    def add(self, length, tokens, seed, choices, poisoned, priority):
        name = str(len(self.requests))
        prompt = [*range(length - 1), POISON if poisoned else 100]
        params = {
            "seed": seed,
            "max_tokens": tokens,
            "n": choices,
            "frequency_penalty": 0.4,
            "logit_bias": {POISON: -100},
        }
        try:
            self.engine.add(toy_request(name, prompt, priority=priority, **params))
        except RequestError as error:
            # The cache is full.
            if error.code is not ErrorCode.OVERLOADED:
                raise
            return
        self.requests[name] = (prompt, params, poisoned)

    @rule(count=st.integers(1, 10))
    def step(self, count):
        for _ in range(count):
            self.outputs.extend(self.engine.step())

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.requests)))
        self.engine.abort(name)
        self.aborted.add(name)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def preempt(self, data):
        self.engine.preempt(data.draw(st.sampled_from(sorted(self.requests))))

    @invariant()
    def blocks_balance(self):
        scheduler, pool = self.engine._scheduler, self.engine._pool
        owners = [block for sequence in scheduler.running for block in sequence.block_table]
        assert all(pool.references(block) == owners.count(block) for block in range(BLOCKS))
        assert pool.num_free + pool.num_idle + pool.num_referenced == BLOCKS
        writable = [
            block
            for sequence in scheduler.running
            for block in sequence.block_table[sequence.num_computed // pool.block_size :]
        ]
        assert len(writable) == len(set(writable))

    def teardown(self):
        self.outputs.extend(drain(self.engine))
        stats = self.engine.stats()
        assert (stats.running, stats.waiting, stats.free_blocks) == (0, 0, BLOCKS)
        transcripts = collect(self.outputs)
        for name, (prompt, params, poisoned) in self.requests.items():
            for choice in range(params["n"]):
                self.check(name, transcripts[name, choice], prompt, params, choice, poisoned)

    def check(self, name, transcript, prompt, params, choice, poisoned):
        ends = [output.finish_reason for output in transcript.outputs if output.finish_reason]
        assert len(ends) == 1
        assert transcript.last.finish_reason == ends[0]
        if ends == ["abort"]:
            assert name in self.aborted
        elif poisoned:
            assert ends == ["error"]
            assert transcript.token_ids == []
        else:
            assert transcript.token_ids == expected(tuple(prompt), choice, **params).token_ids


def expected(prompt, choice, **params):
    """The choice on an engine of its own, with all the room it wants."""
    if choice == 0 and params["n"] > 1:
        params = {**params, "n": 1}
    if params["n"] == 1:
        return generate(list(prompt), **params)
    engine = toy_engine()
    engine.add(toy_request("r", list(prompt), **params))
    return collect(drain(engine))["r", choice]


class TwoStepsMachine(EngineMachine):
    """The same, with a runner that takes two steps at once."""

    steps_in_flight = 2


SETTINGS = settings(max_examples=15, stateful_step_count=20, deadline=None)
TestEngine = EngineMachine.TestCase
TestEngine.settings = SETTINGS
TestTwoSteps = TwoStepsMachine.TestCase
TestTwoSteps.settings = SETTINGS
