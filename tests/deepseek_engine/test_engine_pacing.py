"""A long prompt among running streams, on a clock that the model moves by what its steps would cost."""

import statistics

import pytest
from deepseek_engine import engine as engine_module
from toy_model import ToyModel, toy_engine, toy_request

STEP, DECODE, PREFILL = 0.010, 0.0005, 0.0004
STREAMS, PROMPT = 8, 2000


class PricedModel(ToyModel):
    """Moves a clock by the price of each step; attention makes late prompt tokens dearer than early ones."""

    now = 0.0

    def forward(self, batch, cache):
        for row, context in enumerate(batch.context_lengths):
            count = batch.query_starts[row + 1] - batch.query_starts[row]
            self.now += DECODE if count == 1 else count * PREFILL * (1 + context / 2000)
        self.now += STEP
        return super().forward(batch, cache)


@pytest.fixture
def model(monkeypatch):
    priced = PricedModel()
    monkeypatch.setattr(engine_module.time, "perf_counter", lambda: priced.now)
    return priced


def gaps_of(model, **settings):
    """Undisturbed gaps, and those while the prompt arrives; every stream gets a token in every step."""
    engine = toy_engine(model, num_blocks=512, max_model_len=4000, max_num_seqs=9, **settings)
    for stream in range(STREAMS):
        engine.add(toy_request(str(stream), [stream] * 20, seed=stream, max_tokens=3000, ignore_eos=True))
    quiet, disturbed = [], []
    for gaps in (quiet, disturbed):
        for _ in range(300):
            before = model.now
            told = {output.request_id for output in engine.step()}
            gaps.append(model.now - before)
            if gaps is disturbed:
                assert {str(stream) for stream in range(STREAMS)} <= told
            if "long" in told:
                return quiet[20:], gaps
        engine.add(toy_request("long", [9] * PROMPT, max_tokens=1))
    raise AssertionError("the prompt did not end in 300 steps")


def test_the_longest_gap_stays_below_twice_the_median_and_one_chunk(model):
    quiet, disturbed = gaps_of(model, prefill_gap=2.0, prefill_chunk=256)
    median = statistics.median(quiet)
    assert max(disturbed) < 2 * median + 256 * PREFILL
    # Once it has seen a few mixed steps it holds twice the median by itself.
    assert max(disturbed[5:]) < 2.2 * median


def test_a_wider_gap_ends_the_prompt_in_fewer_steps(model):
    _, narrow = gaps_of(model, prefill_gap=1.5, prefill_chunk=256)
    _, wide = gaps_of(PricedModel(), prefill_gap=None, prefill_chunk=256)
    assert len(wide) == 8
    assert len(narrow) > 2 * len(wide)
