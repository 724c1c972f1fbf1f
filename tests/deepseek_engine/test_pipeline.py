"""Two steps under way: outputs are those of one at a time, and whatever goes wrong harms nobody else."""

from dataclasses import replace

import pytest
import torch
from deepseek_engine import pipeline as pipeline_module
from deepseek_engine.block_pool import BlockPool
from deepseek_engine.engine import Engine
from deepseek_engine.pipeline import Pipeline
from deepseek_engine.runners.torch import TorchRunner
from deepseek_engine.step_plan import LAST_SAMPLED, StepPlan, StepResult
from hypothesis import given, settings
from hypothesis import strategies as st
from piccard_contract.errors import ErrorCode, RequestError
from toy_model import ToyModel, Transcript, collect, drain, generate, run, toy_engine, toy_request
from toy_tokenizer import EOS

PROMPT = list(range(40, 90))
BLOCKS = 16
LETTERS = b"abc \xe2\x82\xac"
# Few tokens are likely, so that stop strings, stop tokens and ends of sequence turn up soon.
NARROW = {**dict.fromkeys(LETTERS, 8.0), EOS: 5.0}


class Recorded(TorchRunner):
    """Takes two steps at once, and tells what is done in which order; steps whose number is in `failing` raise."""

    steps_in_flight = 2

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.events = []
        self.plans = []
        self.failing = {}

    def execute(self, plan, interrupt=None):
        number = len(self.plans)
        self.plans.append(plan)
        self.events.append(("execute", number))
        if self.failing.get(number) == "execute":
            raise RuntimeError("the start failed")
        return number, super().execute(plan, interrupt)

    def collect(self, handle):
        number, own = handle
        self.events.append(("collect", number))
        if self.failing.get(number) == "collect":
            raise RuntimeError("the step failed")
        if self.failing.get(number) == "lost":
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nadvice")
        return super().collect(own)


def recorded(model=None, **settings) -> tuple[Engine, Recorded]:
    engine = toy_engine(model, runner=Recorded, **settings)
    return engine, engine._runner


def rows(runner):
    """Of each step: sequence, first position, tokens."""
    return [[(row.sequence_id, row.start, row.token_ids) for row in plan.rows] for plan in runner.plans]


def told(transcript: Transcript) -> tuple:
    """All that a client is told, but what depends on who else ran."""
    last = transcript.last
    return (
        transcript.token_ids,
        transcript.text,
        [output.text for output in transcript.outputs],
        transcript.logprobs,
        transcript.outputs[0].prompt_logprobs,
        last.finish_reason,
        last.stop_reason,
        last.cumulative_logprob,
        last.num_output_tokens,
        last.num_prompt_tokens,
    )


def test_a_step_is_started_before_the_last_one_is_collected():
    engine, runner = recorded()
    alone = generate(PROMPT, temperature=0, max_tokens=5, ignore_eos=True)
    transcript = generate(PROMPT, engine=engine, temperature=0, max_tokens=5, ignore_eos=True)
    assert transcript == alone
    started = [("execute", number) for number in range(5)]
    assert runner.events == [
        *started[:2],
        ("collect", 0),
        *(event for number in range(1, 4) for event in (started[number + 1], ("collect", number))),
        ("collect", 4),
    ]
    assert rows(runner)[1:] == [[(0, 50 + place, [LAST_SAMPLED])] for place in range(4)]


def test_a_runner_of_one_step_is_never_given_two():
    engine, runner = recorded(steps_in_flight=1)
    generate(PROMPT, engine=engine, max_tokens=5, ignore_eos=True)
    assert runner.events == [(what, number) for number in range(5) for what in ("execute", "collect")]
    assert all(LAST_SAMPLED not in tokens for step in rows(runner) for _, _, tokens in step)


def test_the_token_after_an_end_is_dropped():
    alone = generate(PROMPT, temperature=0, max_tokens=20, ignore_eos=True, logprobs=2)
    stop = alone.token_ids[3]
    engine, runner = recorded()
    params = {"temperature": 0, "max_tokens": 20, "ignore_eos": True, "logprobs": 2, "stop_token_ids": [stop]}
    transcript = generate(PROMPT, engine=engine, **params)
    told = alone.token_ids.index(stop) + 1
    assert transcript == generate(PROMPT, **params)
    assert len(runner.plans) == told + 1
    assert engine.stats() == replace(engine.stats(), generated_tokens=told, running=0, free_blocks=64)
    assert not engine.has_work()
    # The runner hears of the end with the next plan.
    generate(PROMPT, engine=engine, max_tokens=1)
    assert list(runner._known) == [1]


def test_a_name_may_be_used_again_while_a_step_of_its_last_owner_is_under_way():
    engine, _ = recorded()
    engine.add(toy_request("r", PROMPT, seed=1, max_tokens=30, ignore_eos=True))
    engine.step()
    engine.abort("r")
    engine.add(toy_request("r", PROMPT[:7], seed=2, max_tokens=9))
    outputs = drain(engine)
    assert outputs[0].finish_reason == "abort"
    assert told(collect(outputs[1:])["r", 0]) == told(generate(PROMPT[:7], seed=2, max_tokens=9))


def test_an_abort_of_all_leaves_work_until_the_step_under_way_is_in():
    engine, runner = recorded()
    engine.add(toy_request("r", PROMPT, max_tokens=30, ignore_eos=True))
    engine.step()
    engine.abort("r")
    assert [output.finish_reason for output in engine.step()] == ["abort"]
    assert runner.events[-1] == ("collect", len(runner.plans) - 1)
    assert not engine.has_work()


def test_only_a_row_that_was_in_the_last_step_names_its_token():
    engine, runner = recorded(num_blocks=BLOCKS, max_model_len=128, max_num_seqs=4, max_num_batched_tokens=24)
    run(engine, *(toy_request(str(place), [place] * 40, max_tokens=40, ignore_eos=True) for place in range(4)))
    assert engine.stats().preemptions > 0
    sampled = set()
    for plan in runner.plans:
        for row in plan.rows:
            if LAST_SAMPLED in row.token_ids:
                assert row.token_ids == [LAST_SAMPLED]
                assert row.sequence_id in sampled
        sampled = {row.sequence_id for row in plan.rows if row.sample}


PARAMS = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 16)},
    optional={
        "temperature": st.just(0.7),
        "min_tokens": st.integers(0, 12),
        "stop": st.sampled_from([["a"], ["ab", "c "], ["\u20ac"]]),
        "stop_token_ids": st.sampled_from([[99], [32, 98]]),
        "include_stop_str_in_output": st.booleans(),
        "ignore_eos": st.booleans(),
        # 1 is greedy: several choices would all be the same.
        "n": st.integers(1, 3),
        "frequency_penalty": st.just(0.8),
        "repetition_penalty": st.just(1.3),
        "presence_penalty": st.just(0.5),
        "top_p": st.just(0.9),
        "logprobs": st.integers(0, 2),
        "prompt_logprobs": st.integers(0, 1),
        "logit_bias": st.just(NARROW),
    },
)
# When it comes, its prompt's length and token, tokens generated elsewhere, and its parameters.
REQUEST = st.tuples(st.integers(0, 12), st.integers(1, 70), st.integers(0, 1), st.integers(0, 7), PARAMS)
# After how many steps something happens to which of the requests.
EVENTS = st.lists(st.tuples(st.integers(0, 25), st.integers(0, 4)), max_size=4)


def made(name, length, token, resumed, params):
    """A request whose parameters agree with one another."""
    own = {"seed": int(name), **params}
    if "min_tokens" in own:
        own["min_tokens"] = min(own["min_tokens"], own["max_tokens"])
    if own.get("n") == 1:
        own["temperature"] = 0
    output_ids = list(LETTERS[: min(resumed, own["max_tokens"])]) if "n" not in own else []
    return toy_request(name, [token] * length, output_ids=output_ids, **own)


def taken(engine, request):
    """Whether a request is; one that is refused because the cache is full comes again."""
    try:
        engine.add(request)
    except RequestError as error:
        if error.code is not ErrorCode.OVERLOADED:
            raise
        return False
    return True


def played(requests, aborts, preemptions, **settings):
    """Outputs of an engine to which the requests come at their time."""
    engine = toy_engine(num_blocks=BLOCKS, max_model_len=160, max_num_seqs=4, max_num_batched_tokens=24, **settings)
    coming = [(at, made(str(place), *rest)) for place, (at, *rest) in enumerate(requests)]
    outputs, step = [], 0
    while coming or engine.has_work():
        assert step < 2000, engine.stats()
        coming = [(at, request) for at, request in coming if at > step or not taken(engine, request)]
        for at, place in aborts:
            if at == step:
                engine.abort(str(place))
        for at, place in preemptions:
            if at == step:
                engine.preempt(str(place))
        outputs += engine.step()
        step += 1
    return engine, collect(outputs)


@settings(deadline=None, max_examples=25)
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=5),
    aborts=EVENTS,
    preemptions=EVENTS,
    chunk=st.sampled_from([3, 24]),
    caching=st.booleans(),
)
def test_outputs_are_those_of_one_step_at_a_time(requests, aborts, preemptions, chunk, caching):
    sides = [
        played(requests, aborts, preemptions, steps_in_flight=steps, prefill_chunk=chunk, enable_prefix_caching=caching)
        for steps in (1, 2)
    ]
    whole = sides[0][1] if not aborts else played(requests, [], [], steps_in_flight=1)[1]
    for engine, transcripts in sides:
        assert transcripts.keys() == whole.keys()
        for name, transcript in transcripts.items():
            check(transcript, whole[name], aborted=any(str(place) == name[0] for _, place in aborts))
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.free_blocks) == (0, 0, BLOCKS)
        assert stats.generated_tokens == sum(len(transcript.token_ids) for transcript in transcripts.values())
        # Once the next plan has brought what ended, the runner knows nobody.
        run(engine, toy_request("last", [5], max_tokens=1))
        assert len(engine._runner._known) == len(engine._runner._sampler._states) == 1


def check(transcript, whole, aborted):
    assert sum(output.finish_reason is not None for output in transcript.outputs) == 1
    if aborted and transcript.last.finish_reason == "abort":
        assert transcript.token_ids == whole.token_ids[: len(transcript.token_ids)]
        assert whole.text.startswith(transcript.text) or whole.last.stop_reason is not None
        assert transcript.logprobs == whole.logprobs[: len(transcript.token_ids)]
    else:
        assert told(transcript) == told(whole)


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    failing=st.dictionaries(st.integers(0, 18), st.sampled_from(["execute", "collect"]), min_size=1, max_size=3),
)
def test_a_step_that_fails_ends_its_own_requests(lengths, failing):
    engine, runner = recorded(num_blocks=BLOCKS, max_model_len=160, max_num_seqs=4, max_num_batched_tokens=24)
    runner.failing = failing
    requests = [
        toy_request(str(place), [place] * length, seed=place, max_tokens=12, ignore_eos=True)
        for place, length in enumerate(lengths)
    ]
    transcripts = run(engine, *requests)
    # One choice a request, so sequences are numbered as requests are. What ended in a step that was collected before
    # is not harmed by one that goes on with it.
    ended, failed = set(), set()
    for what, number in runner.events:
        if runner.failing.get(number) == what:
            failed |= {row.sequence_id for row in runner.plans[number].rows} - ended
    for place, length in enumerate(lengths):
        transcript = transcripts[str(place), 0]
        alone = generate([place] * length, seed=place, max_tokens=12, ignore_eos=True)
        if transcript.last.error is None:
            assert place not in failed
            assert transcript.token_ids == alone.token_ids
        else:
            assert place in failed
            assert transcript.last.error.code is ErrorCode.INTERNAL
            assert transcript.token_ids == alone.token_ids[: len(transcript.token_ids)]
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.free_blocks) == (0, 0, BLOCKS)


def test_a_failed_step_fails_what_goes_on_after_it_and_nothing_else():
    engine, runner = recorded(max_num_batched_tokens=64, max_num_seqs=2)
    runner.failing = {1: "collect"}
    engine.add(toy_request("old", PROMPT, max_tokens=9, ignore_eos=True))
    assert [output.request_id for output in engine.step()] == ["old"]
    engine.add(toy_request("new", PROMPT[:5], seed=3, max_tokens=9, ignore_eos=True))
    outputs = engine.step()
    # Step 2 was started with a row of each.
    assert [row[0] for row in rows(runner)[2]] == [0, 1]
    assert [(output.request_id, output.finish_reason) for output in outputs] == [("old", "error")]
    transcripts = collect(drain(engine))
    assert list(transcripts) == [("new", 0)]
    assert told(transcripts["new", 0]) == told(generate(PROMPT[:5], seed=3, max_tokens=9, ignore_eos=True))
    # Nothing that the failed one has written is shared.
    assert generate(PROMPT, engine=engine, max_tokens=1).last.num_cached_tokens == 0


def test_a_lost_device_ends_the_engine_whatever_is_under_way():
    engine, runner = recorded()
    runner.failing = {2: "lost"}
    engine.add(toy_request("r", PROMPT, seed=3, max_tokens=9, ignore_eos=True))
    ids = [token for _ in range(2) for output in engine.step() for token in output.token_ids]
    assert ids == generate(PROMPT, seed=3, max_tokens=2, ignore_eos=True).token_ids
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        engine.step()
    # Step 3 was started already, and nothing waits for it.
    assert runner.events[-2:] == [("execute", 3), ("collect", 2)]


def test_tokens_of_the_step_before_are_told_when_the_next_cannot_be_started():
    engine, runner = recorded()
    runner.failing = {2: "execute"}
    params = {"seed": 3, "max_tokens": 9, "ignore_eos": True}
    transcript = run(engine, toy_request("r", PROMPT, **params))["r", 0]
    assert transcript.last.error is not None
    assert transcript.token_ids == generate(PROMPT, **params).token_ids[:2]


def test_a_request_that_ended_is_not_failed_by_a_step_that_could_not_be_started():
    engine, runner = recorded()
    stop = generate(PROMPT, temperature=0, max_tokens=2).token_ids[1]
    runner.failing = {2: "execute"}
    transcript = generate(PROMPT, engine=engine, temperature=0, max_tokens=9, stop_token_ids=[stop])
    assert (transcript.last.finish_reason, transcript.last.stop_reason) == ("stop", stop)


@pytest.mark.parametrize("params", [{"temperature": 0}, {"seed": 5}, {"seed": 5, "top_k": 3}])
def test_a_row_after_logits_that_are_not_numbers_harms_nobody(params):
    poison = 200
    engine = toy_engine(ToyModel(poison=poison), steps_in_flight=2)
    sound = toy_request("sound", PROMPT, seed=1, max_tokens=20, ignore_eos=True)
    transcripts = run(engine, toy_request("broken", [*PROMPT, poison], max_tokens=20, **params), sound)
    assert transcripts["broken", 0].last.error.code is ErrorCode.NUMERICAL_ERROR
    assert transcripts["broken", 0].token_ids == []
    assert told(transcripts["sound", 0]) == told(generate(PROMPT, seed=1, max_tokens=20, ignore_eos=True))


def test_a_prefix_is_published_when_its_step_is_in(monkeypatch):
    engine, runner = recorded(max_num_batched_tokens=16, max_num_seqs=4)
    published = []
    publish = BlockPool.publish

    def noted(pool, block, key):
        published.append(sum(what == "collect" for what, _ in runner.events))
        publish(pool, block, key)

    monkeypatch.setattr(BlockPool, "publish", noted)
    generate(PROMPT, engine=engine, max_tokens=1)
    assert published == [1, 2, 3]


class Clocked:
    """A device that works on its steps one after another, on a clock of its own."""

    steps_in_flight = 2

    def __init__(self, seconds):
        self.now = 1000.0
        self._seconds = seconds
        self._free_at = 0.0

    def execute(self, plan, interrupt=None):
        self._free_at = max(self._free_at, self.now) + self._seconds[len(plan.rows)]
        return self._free_at

    def collect(self, handle):
        self.now = max(self.now, handle)
        return StepResult([])


def test_a_step_takes_the_time_between_two_collects(monkeypatch):
    device = Clocked([0.0, 0.25, 3.0])
    monkeypatch.setattr(pipeline_module.time, "perf_counter", lambda: device.now)
    pipeline = Pipeline(device)
    pipeline.start([], StepPlan([None]))
    pipeline.start([], StepPlan([None, None]))
    assert not pipeline.has_room
    assert pipeline.collect(pipeline.pop())[1] == 0.25
    pipeline.start([], StepPlan([None]))
    assert [pipeline.collect(pipeline.pop())[1] for _ in range(2)] == [3.0, 0.25]
    # After a pause it is counted from the start.
    device.now += 100.0
    pipeline.start([], StepPlan([None]))
    assert pipeline.collect(pipeline.pop())[1] == 0.25
    assert len(pipeline) == 0
