"""An engine with more to do than it can: what it refuses, gives up, drops and lets go first."""

import pytest
from deepseek_engine.engine import Engine
from deepseek_engine.request import EngineOutput
from deepseek_engine.runners.torch import TorchRunner
from deepseek_engine.settings import EngineSettings
from piccard_contract.errors import ErrorCode, RequestError
from toy_model import ToyModel, collect, drain, toy_request
from toy_tokenizer import toy_tokenizer

pytestmark = pytest.mark.usefixtures("steps_in_flight")

BLOCK = 16


class Clock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def engine_with(clock: Clock | None = None, **changes: object) -> Engine:
    settings = EngineSettings(**{"num_blocks": 20, "prefill_gap": None, "max_num_seqs": 1, **changes})  # type: ignore[arg-type]
    return Engine(TorchRunner(ToyModel(), settings), toy_tokenizer(), settings, clock or Clock())


def refusal(engine: Engine, *arguments: object, **params: object) -> RequestError:
    with pytest.raises(RequestError) as raised:
        engine.add(toy_request(*arguments, **params))  # type: ignore[arg-type]
    assert raised.value.code is ErrorCode.OVERLOADED
    assert raised.value.retry_after is not None
    return raised.value


def test_a_full_queue_refuses_and_takes_again_when_there_is_room() -> None:
    engine = engine_with(max_num_waiting=2)
    for name in ("a", "b"):
        engine.add(toy_request(name, [1, 2], max_tokens=3, ignore_eos=True))
    assert "2 sequences wait already" in refusal(engine, "c", [1], max_tokens=1).message
    assert engine.stats().refused == 1
    engine.step()
    engine.add(toy_request("c", [1], max_tokens=1))
    assert {output.request_id for output in drain(engine)} == {"a", "b", "c"}


def test_a_request_that_was_begun_elsewhere_is_always_taken() -> None:
    engine = engine_with(max_num_waiting=1, num_blocks=2)
    engine.add(toy_request("a", [1] * 20, max_tokens=8, ignore_eos=True))
    engine.step()
    engine.add(toy_request("b", [1, 2, 3], max_tokens=5, output_ids=[4, 5], ignore_eos=True))
    engine.add(toy_request("c", [1, 2, 3], max_tokens=5, output_ids=[4, 5], ignore_eos=True))
    ended = collect(drain(engine))
    assert len(ended["a", 0].token_ids) == 7
    assert [len(ended[name, 0].token_ids) for name in ("b", "c")] == [3, 3]


def test_who_waits_too_long_is_answered() -> None:
    clock = Clock()
    engine = engine_with(clock, max_queue_seconds=5.0)
    engine.add(toy_request("runs", [1, 2], max_tokens=50, ignore_eos=True))
    engine.step()
    engine.add(toy_request("waits", [1, 2], max_tokens=3, n=2))
    clock.now += 5.0
    assert {output.request_id for output in engine.step()} == {"runs"}
    clock.now += 0.1
    failed = [output for output in engine.step() if output.request_id == "waits"]
    assert [(output.choice, output.finish_reason) for output in failed] == [(0, "error"), (1, "error")]
    assert failed[0].error is not None
    assert (failed[0].error.code, failed[0].error.retry_after) == (ErrorCode.OVERLOADED, 1.0)
    assert engine.stats().refused == 1
    assert len(collect(drain(engine))["runs", 0].token_ids) == 47


def test_a_preempted_request_is_not_given_up() -> None:
    clock = Clock()
    engine = engine_with(clock, max_queue_seconds=5.0)
    engine.add(toy_request("a", [1, 2], max_tokens=4, ignore_eos=True))
    engine.step()
    engine.preempt("a")
    clock.now += 60.0
    assert len(collect(drain(engine))["a", 0].token_ids) == 3


def test_a_retry_is_promised_after_what_others_have_waited() -> None:
    clock = Clock()
    engine = engine_with(clock, max_num_waiting=1)
    for turn in range(8):
        engine.add(toy_request(str(turn), [1, 2], max_tokens=1))
        clock.now += 20.0
        engine.step()
    engine.add(toy_request("last", [1, 2], max_tokens=1))
    assert 10.0 < (refusal(engine, "c", [1], max_tokens=1).retry_after or 0.0) <= 20.0


def test_short_requests_go_before_a_long_one_that_came_with_them() -> None:
    engine = engine_with()
    for name, length in (("long", 200), ("short", 3), ("middle", 60)):
        engine.add(toy_request(name, [1] * length, max_tokens=2, ignore_eos=True))
    assert list(dict.fromkeys(output.request_id for output in drain(engine))) == ["short", "middle", "long"]


def test_a_full_cache_refuses_until_it_has_emptied() -> None:
    engine = engine_with(max_num_seqs=4)
    engine.add(toy_request("a", [1] * (19 * BLOCK - 4), max_tokens=20, ignore_eos=True))
    engine.step()
    assert "cache is full" in refusal(engine, "b", [1], max_tokens=1).message
    assert engine.stats().pressure == 3
    drain(engine)
    engine.add(toy_request("b", [1], max_tokens=1))
    assert engine.stats().pressure == 0


def test_a_nearly_full_cache_takes_short_prompts_alone() -> None:
    engine = engine_with(max_num_seqs=4)
    engine.add(toy_request("a", [1] * (18 * BLOCK - 4), max_tokens=2, ignore_eos=True))
    engine.step()
    assert "at most 20 tokens for now, not of 21" in refusal(engine, "b", [1] * 21, max_tokens=1).message
    assert engine.stats().pressure == 2
    engine.add(toy_request("c", [1] * 20, max_tokens=1))
    assert "c" in {output.request_id for output in drain(engine)}


def test_unused_prefixes_are_dropped_when_the_cache_is_tight() -> None:
    engine = engine_with(max_num_seqs=4)
    engine.add(toy_request("old", [7] * 33, max_tokens=1))
    drain(engine)
    assert engine.stats().cached_blocks == 2
    engine.add(toy_request("a", [1] * (15 * BLOCK), max_tokens=40, ignore_eos=True))
    engine.step()
    assert engine.stats().cached_blocks == 2
    while engine.stats().pressure == 0:
        engine.step()
    assert engine.stats().cached_blocks == 0


def test_prompts_come_in_halves_when_the_cache_is_tight() -> None:
    model = ToyModel()
    settings = EngineSettings(num_blocks=40, prefill_gap=None, max_num_seqs=4, prefill_chunk=32, block_size=BLOCK)
    engine = Engine(TorchRunner(model, settings), toy_tokenizer(), settings, Clock())
    engine.add(toy_request("a", [1] * (33 * BLOCK), max_tokens=40, ignore_eos=True))
    engine.step()
    engine.add(toy_request("b", [2] * 64, max_tokens=1))
    engine.step()
    assert engine.stats().pressure == 1
    assert model.steps[-1] == [1, 16]


def first_text(outputs: list[EngineOutput]) -> list[str]:
    return list(dict.fromkeys(output.request_id for output in outputs))


def test_a_better_priority_takes_the_blocks_of_a_worse_one_when_they_are_scarce() -> None:
    engine = engine_with(max_num_seqs=4)
    engine.add(toy_request("worse", [1] * (18 * BLOCK - 4), max_tokens=30, ignore_eos=True, priority=5))
    engine.step()
    engine.add(toy_request("better", [2] * 20, max_tokens=20, ignore_eos=True))
    engine.add(toy_request("equal", [3] * 20, max_tokens=20, ignore_eos=True, priority=5))
    outputs = drain(engine)
    assert engine.stats().preemptions == 1
    ended = {output.request_id: output.num_output_tokens for output in outputs if output.finish_reason}
    assert list(ended.items()) == [("better", 20), ("equal", 20), ("worse", 30)]


def test_equals_do_not_take_from_one_another() -> None:
    engine = engine_with(max_num_seqs=4)
    engine.add(toy_request("a", [1] * (18 * BLOCK - 4), max_tokens=4, ignore_eos=True))
    engine.step()
    engine.add(toy_request("b", [2] * 20, max_tokens=20, ignore_eos=True))
    assert first_text(drain(engine)) == ["a", "b"]
    assert engine.stats().preemptions == 0


def test_load_is_that_of_whatever_is_fullest() -> None:
    engine = engine_with(max_num_seqs=4, max_num_waiting=10, enable_prefix_caching=False)
    assert engine.stats().load == 0.0
    engine.add(toy_request("short", [1, 2], max_tokens=50, ignore_eos=True))
    assert engine.stats().load == 0.1
    engine.step()
    assert engine.stats().load == 0.25
    engine.add(toy_request("long", [1] * 15 * BLOCK, max_tokens=8, ignore_eos=True))
    engine.step()
    assert engine.stats().load == pytest.approx(1 - engine.stats().free_blocks / 20)
    assert engine.stats().load > 0.75
    for name in range(9):
        engine.add(toy_request(str(name), [1] * BLOCK, max_tokens=8, ignore_eos=True))
    assert engine.stats().load == 0.9
    drain(engine)
    assert engine.stats().load == 0.0
