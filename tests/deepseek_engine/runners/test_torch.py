"""The torch runner alone: what a step plan means, row by row."""

import pickle
from itertools import pairwise

import pytest
import torch
from deepseek_engine.runners.torch import TorchRunner
from deepseek_engine.settings import EngineSettings
from deepseek_engine.step_plan import LAST_SAMPLED, NewSequence, StepPlan, StepRow
from hypothesis import given, settings
from hypothesis import strategies as st
from piccard_contract.sampling import SamplingParams
from toy_model import ToyModel

BLOCKS = 32
GREEDY = SamplingParams(temperature=0)


def runner_of(model=None):
    return TorchRunner(model or ToyModel(), EngineSettings(num_blocks=BLOCKS))


def new(identity, prompt, params=GREEDY, seed=1):
    return NewSequence(identity, params, list(prompt), [], 0, (257,), seed)


def step(runner, rows, **plan):
    return runner.collect(runner.execute(StepPlan(rows=rows, **plan)))


def greedy_chain(prompt, count):
    """Tokens by the toy's own definition."""
    model, tokens = ToyModel(), list(prompt)
    for _ in range(count):
        total = sum((token + 1) * (place * 37 + 11) for place, token in enumerate(tokens))
        tokens.append(int(model.logits(torch.tensor([[float(total % 8191)]])).argmax()))
    return tokens[len(prompt) :]


@settings(deadline=None, max_examples=30)
@given(
    length=st.integers(1, 60),
    cuts=st.sets(st.integers(1, 59)),
    blocks=st.permutations(range(BLOCKS)),
)
def test_chunks_and_blocks_in_any_order_give_the_same_tokens(length, cuts, blocks):
    prompt = [(place * 7) % 250 for place in range(length)]
    runner = runner_of()
    edges = [0, *sorted(cut for cut in cuts if cut < length), length]
    table = blocks[:6]
    fresh = [new(0, prompt)]
    for start, stop in pairwise(edges):
        row = StepRow(0, prompt[start:stop], start, table, sample=stop == length)
        result = step(runner, [row], new=fresh)
        assert len(result.token_ids[0]) == (stop == length)
        fresh = []
    tokens = result.token_ids[0]
    for place in range(length, length + 4):
        tokens += step(runner, [StepRow(0, [tokens[-1]], place, table, True)]).token_ids[0]
    assert tokens == greedy_chain(prompt, 5)


def test_a_row_may_name_the_token_sampled_last_before_it_was_collected():
    prompts = [list(range(10)), list(range(50, 63))]
    runner = runner_of()
    handles = [
        runner.execute(
            StepPlan(
                rows=[StepRow(i, prompt, 0, [2 * i, 2 * i + 1], True) for i, prompt in enumerate(prompts)],
                new=[new(i, prompt) for i, prompt in enumerate(prompts)],
            )
        )
    ]
    for offset in range(3):
        # The rows change their places, so that the token has to be found by its sequence.
        rows = [
            StepRow(i, [LAST_SAMPLED], len(prompts[i]) + offset, [2 * i, 2 * i + 1], True)
            for i in ((0, 1) if offset % 2 else (1, 0))
        ]
        handles.append(runner.execute(StepPlan(rows=rows)))
    results = [runner.collect(handle).token_ids for handle in handles]
    assert [row[0] for row in (results[0][0], results[1][1], results[2][0], results[3][1])] == greedy_chain(
        prompts[0], 4
    )
    assert [row[0] for row in (results[0][1], results[1][0], results[2][1], results[3][0])] == greedy_chain(
        prompts[1], 4
    )


def test_naming_the_last_token_without_one_is_an_error():
    runner = runner_of()
    with pytest.raises(ValueError, match="nothing was sampled"):
        runner.execute(StepPlan(rows=[StepRow(0, [LAST_SAMPLED], 0, [0], True)], new=[new(0, [1])]))


def test_a_plan_is_plain_data():
    plan = StepPlan(
        rows=[StepRow(0, [1, 2], 0, [3], True, prompt_logprobs=range(1, 2), token_mask=b"\xff" * 33)],
        new=[new(0, [1, 2], SamplingParams(seed=3, prompt_logprobs=1))],
        finished=[7],
    )
    copy = pickle.loads(pickle.dumps(plan))
    assert copy == plan
    assert copy.num_tokens == 2
    assert step(runner_of(), copy.rows, new=copy.new) == step(runner_of(), plan.rows, new=plan.new)


def test_a_token_mask_reaches_the_draw():
    allowed = bytearray(33)
    allowed[5 // 8] |= 1 << 5 % 8
    row = StepRow(0, [1, 2], 0, [0], True, token_mask=bytes(allowed))
    assert step(runner_of(), [row], new=[new(0, [1, 2])]).token_ids == [[5]]


def test_prompt_logprobs_come_in_pieces_of_any_size():
    prompt = [(place * 3) % 250 for place in range(300)]
    params = SamplingParams(temperature=0, prompt_logprobs=2)
    table = list(range(20))
    whole = step(
        runner_of(), [StepRow(0, prompt, 0, table, True, range(1, 300))], new=[new(0, prompt, params)]
    ).prompt_logprobs[0]
    runner, ids, ranks = runner_of(), [], []
    for start in range(0, 300, 47):
        stop = min(start + 47, 300)
        row = StepRow(0, prompt[start:stop], start, table, stop == 300, range(start + 1, min(stop + 1, 300)))
        told = step(runner, [row], new=[new(0, prompt, params)] if start == 0 else []).prompt_logprobs[0]
        ids += told.token_ids
        ranks += told.ranks
    assert (ids, ranks) == (whole.token_ids, whole.ranks)
    assert [row[0] for row in ids] == prompt[1:]


def test_finished_sequences_are_dropped_and_their_ids_may_come_again():
    runner = runner_of()
    params = SamplingParams(temperature=0, frequency_penalty=2.0)
    results = []
    for _ in range(3):
        result = step(runner, [StepRow(0, [1, 2, 3], 0, [0], True)], new=[new(0, [1, 2, 3], params)])
        results.append(result.token_ids)
        step(runner, [], finished=[0, 99])
    assert results[0] == results[1] == results[2]
    assert runner._known == {}
    assert runner._sampler._states == {}


def test_a_row_whose_logits_are_not_numbers_fails_alone():
    runner = runner_of(ToyModel(poison=7))
    rows = [StepRow(0, [1, 7], 0, [0], True), StepRow(1, [1, 2], 0, [1], True)]
    result = step(runner, rows, new=[new(0, [1, 7]), new(1, [1, 2])])
    assert list(result.errors) == [0]
    assert result.token_ids == [[], greedy_chain([1, 2], 1)]
