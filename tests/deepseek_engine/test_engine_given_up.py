"""Steps that are given up in their middle: what they have written counts for nothing, and nobody else is harmed."""

import pytest
from deepseek_engine.departures import Departures
from deepseek_engine.engine import Engine
from deepseek_engine.request import EngineOutput
from hypothesis import given
from hypothesis import strategies as st
from toy_model import ToyModel, collect, generate, toy_engine, toy_request

PROMPT = list(range(40, 90))


class Leaving(ToyModel):
    """Some requests leave in the middle of the model's steps, by the step's number; every step looks once at it."""

    def __init__(self, leaves: dict[int, set[str]]):
        super().__init__()
        self.leaves = leaves
        self.departures = Departures()
        self.given_up = 0

    def forward(self, batch, cache):
        for identity in self.leaves.get(len(self.steps), ()):
            self.departures.add(identity)
        hidden = super().forward(batch, cache)
        self.given_up += 1
        batch.check()
        self.given_up -= 1
        return hidden


def played(model: Leaving, engine: Engine, *, abort: bool) -> list[EngineOutput]:
    """Step to the end; whoever leaves is aborted after the step, or changes its mind."""
    outputs = []
    while engine.has_work():
        outputs.extend(engine.step(model.departures))
        for identity in {identity for leaving in model.leaves.values() for identity in leaving}:
            model.departures.remove(identity)
            if abort and len(model.steps) > min(at for at, leaving in model.leaves.items() if identity in leaving):
                engine.abort(identity)
    return outputs


def test_the_step_of_one_that_leaves_is_given_up_and_all_is_freed():
    model = Leaving({1: {"a"}})
    engine = toy_engine(model, max_num_batched_tokens=16, max_num_seqs=4)
    engine.add(toy_request("a", PROMPT, max_tokens=5))
    (output,) = played(model, engine, abort=True)
    assert (output.finish_reason, output.token_ids) == ("abort", [])
    assert (model.given_up, model.steps) == (1, [[16], [16]])
    stats = engine.stats()
    assert stats.free_blocks == stats.total_blocks
    # What the step left in the cache is nobody's prefix; the whole step before it is.
    again = generate(PROMPT, engine=engine, max_tokens=9)
    assert again.token_ids == generate(PROMPT, max_tokens=9).token_ids
    assert engine.stats().prefix_hit_tokens == 16


def test_a_step_goes_on_for_who_stays():
    model = Leaving({0: {"a"}})
    engine = toy_engine(model)
    engine.add(toy_request("a", PROMPT, max_tokens=5))
    engine.add(toy_request("b", PROMPT[5:], max_tokens=9))
    told = collect(played(model, engine, abort=True))
    assert model.given_up == 0
    assert told["b", 0].token_ids == generate(PROMPT[5:], max_tokens=9).token_ids
    assert told["a", 0].last.finish_reason == "abort"


def test_without_departures_nothing_is_given_up():
    model = Leaving({0: {"a"}})
    assert (
        generate(PROMPT, engine=toy_engine(model), max_tokens=9).token_ids == generate(PROMPT, max_tokens=9).token_ids
    )


@given(
    at=st.dictionaries(st.integers(0, 20), st.sets(st.sampled_from("ab"), min_size=1), max_size=12),
    n=st.integers(1, 2),
    chunk=st.sampled_from([8, 16, 64]),
    caching=st.booleans(),
)
@pytest.mark.usefixtures("steps_in_flight")
def test_a_step_that_was_given_up_is_run_again_for_who_stays_after_all(at, n, chunk, caching):
    """As if nothing had been: tokens, log-probabilities and texts are those of an engine that nobody disturbs."""
    wanted = {
        "a": {"max_tokens": 12, "n": n, "logprobs": 1, "prompt_logprobs": 1, "repetition_penalty": 1.2},
        "b": {"max_tokens": 8, "stop": ["x"]},
    }

    def told(leaves):
        model = Leaving(leaves)
        engine = toy_engine(model, max_num_batched_tokens=chunk, max_num_seqs=4, enable_prefix_caching=caching)
        for name, params in wanted.items():
            engine.add(toy_request(name, [*PROMPT, ord(name)], **params))
        found = collect(played(model, engine, abort=False))
        assert engine.stats().free_blocks == engine.stats().total_blocks
        return {
            name: (one.token_ids, one.text, one.logprobs, one.outputs[0].prompt_logprobs, one.last.finish_reason)
            for name, one in found.items()
        }

    assert told(at) == told({})
