"""What rows of a step ask of the runner of device kernels, and what it remembers of their sequences.

One dense layer, so that a step is short in Triton's interpreter.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from device_kernels import INTERPRETING, needs_device

pytest.importorskip("triton")
from deepseek_engine.step_plan import LAST_SAMPLED, StepPlan
from piccard_contract.sampling import SamplingParams
from random_checkpoints import VOCAB_SIZE, random_token_ids
from runner_pair import EOS, RunnerPair, new, row

pytestmark = [
    needs_device,
    pytest.mark.skipif(not INTERPRETING, reason="the interpreter alone computes in float32, as the reference"),
]
POISON = 7


@pytest.fixture
def pair(checkpoint_folder: Callable[[str], Path]) -> RunnerPair:
    return RunnerPair(checkpoint_folder("v3"), layers=1)


def short_prompts(count: int, length: int = 3) -> list[list[int]]:
    return [random_token_ids(length, seed) for seed in range(count)]


def run(pair: RunnerPair, params: list[SamplingParams], steps: int, outputs: tuple[tuple[int, ...], ...] = ()) -> None:
    """Prompts of three tokens in one step, then decodes that name their tokens by the step before."""
    prompts = short_prompts(len(params))
    told = [*outputs, *[()] * (len(params) - len(outputs))]
    tokens = [[*prompt, *output] for prompt, output in zip(prompts, told, strict=True)]
    handles = pair.start(
        *(row(place, one, 0, [place]) for place, one in enumerate(tokens)),
        new=[new(place, prompts[place], one, told[place], choice=place % 2) for place, one in enumerate(params)],
    )
    for step in range(steps):
        following = pair.start(
            *(row(place, [LAST_SAMPLED], len(one) + step, [place]) for place, one in enumerate(tokens))
        )
        pair.finish(handles)
        handles = following
    pair.finish(handles)


def test_penalties_and_filters_draw_the_same(pair: RunnerPair) -> None:
    run(
        pair,
        [
            SamplingParams(temperature=0, repetition_penalty=1.7, logprobs=2),
            SamplingParams(temperature=1.3, frequency_penalty=1.5, presence_penalty=-0.5, top_k=30),
            SamplingParams(temperature=0.7, top_p=0.8, min_p=0.01),
        ],
        steps=4,
        outputs=((), (9, 9, 4)),
    )


def test_biases_and_what_min_tokens_forbids(pair: RunnerPair) -> None:
    # The end of the sequence would be drawn at once.
    bias = {EOS[0]: 100.0, 11: 50.0, 12: 49.0}
    run(
        pair,
        [
            SamplingParams(temperature=0, logit_bias=bias, min_tokens=2, logprobs=1),
            SamplingParams(temperature=0, logit_bias=bias, stop_token_ids=[11], min_tokens=3),
            SamplingParams(temperature=0, logit_bias={5: 100.0}),
            SamplingParams(temperature=1.0),
        ],
        steps=4,
    )


def test_a_biased_row_ends_where_it_should(pair: RunnerPair) -> None:
    """The pair above agrees on what is right."""
    params = SamplingParams(temperature=0, logit_bias={EOS[0]: 100.0, 11: 50.0}, min_tokens=1)
    result = pair.step(row(0, [2, 3], 0, [0]), row(1, [4], 0, [1]), new=[new(0, [2, 3], params), new(1, [4])])
    assert result.token_ids[0] == [11]
    result = pair.step(row(0, [LAST_SAMPLED], 2, [0]), row(1, [LAST_SAMPLED], 1, [1]))
    assert result.token_ids[0] == [EOS[0]]


def test_seeds_and_choices_have_numbers_of_their_own(pair: RunnerPair) -> None:
    params = SamplingParams(temperature=2.0)
    prompt = [5, 6]
    seeds = (3, 3, 2**64 - 5)
    result = pair.step(
        *(row(place, prompt, 0, [place]) for place in range(3)),
        new=[new(place, prompt, params, seed=seed, choice=place) for place, seed in enumerate(seeds)],
    )
    assert len({token for tokens in result.token_ids for token in tokens}) == 3
    pair.step(*(row(place, [LAST_SAMPLED], 2, [place]) for place in range(3)))


@pytest.mark.parametrize("kind", ["decodes", "few tokens", "many tokens"])
def test_a_token_mask_holds_for_its_row_and_step_alone(pair: RunnerPair, kind: str) -> None:
    count = {"decodes": 1, "few tokens": 3, "many tokens": 7}[kind]
    prompts = short_prompts(2, count)
    allowed = bytearray(-(-VOCAB_SIZE // 8))
    for token in (40, 311):
        allowed[token // 8] |= 1 << token % 8
    result = pair.step(
        row(0, prompts[0], 0, [0]),
        row(1, prompts[1], 0, [1], token_mask=bytes(allowed)),
        new=[new(0, prompts[0]), new(1, prompts[1])],
    )
    assert result.token_ids[1][0] in (40, 311)
    pair.step(*(row(place, [LAST_SAMPLED], count, [place]) for place in (1, 0)))


def test_a_mask_that_allows_nothing_fails_its_row_alone(pair: RunnerPair) -> None:
    result = pair.step(
        row(0, [2, 3], 0, [0], token_mask=bytes(-(-VOCAB_SIZE // 8))),
        row(1, [4, 5], 0, [1]),
        new=[new(0, [2, 3]), new(1, [4, 5])],
    )
    assert list(result.errors) == [0]


def test_chunks_that_do_not_reach_the_end_draw_nothing(pair: RunnerPair) -> None:
    params = SamplingParams(temperature=0.5, min_tokens=1, presence_penalty=1.0, prompt_logprobs=2)
    prompt = random_token_ids(24, 5)
    fresh = [new(0, prompt, params)]
    # Ten tokens at once are more than a graph holds, four and one are not.
    for place, (start, stop) in enumerate(((0, 10), (10, 14), (14, 15), (15, 24))):
        wanted = range(start + 1, min(stop + 1, 24))
        chunk = row(0, prompt[start:stop], start, [6, 5], sample=stop == 24, prompt_logprobs=wanted)
        other = row(1, [4], place, [1])
        result = pair.step(chunk, other, new=[*fresh, new(1, [4])] if fresh else [])
        fresh = []
        assert [len(tokens) for tokens in result.token_ids] == [stop == 24, 1]
    pair.step(row(1, [LAST_SAMPLED], 4, [1]), row(0, [LAST_SAMPLED], 24, [6, 5]))


def test_a_step_of_nothing_draws_nothing(pair: RunnerPair) -> None:
    assert pair.step().token_ids == []
    result = pair.step(row(0, [4, 5, 6], 0, [0], sample=False), new=[new(0, [4, 5, 6, 7])], finished=[99])
    assert result.token_ids == [[]]


def test_a_long_context_is_expanded_in_several_chunks(checkpoint_folder: Callable[[str], Path]) -> None:
    pair = RunnerPair(checkpoint_folder("v3"), layers=1, expanded_tokens=20)
    prompts = [random_token_ids(48, 1), random_token_ids(9, 2), random_token_ids(10, 3)]
    tables = [[9, 2, 4, 8], [5], [6]]
    pair.step(row(0, prompts[0][:30], 0, tables[0], sample=False), new=[new(0, prompts[0])])
    # The older chunks of the one, and two that are together, beside a decode.
    pair.step(row(1, prompts[1][:8], 0, tables[1], sample=False), new=[new(1, prompts[1])])
    pair.step(
        row(0, prompts[0][30:], 30, tables[0]),
        row(1, prompts[1][8:], 8, tables[1]),
        row(2, prompts[2], 0, tables[2]),
        new=[new(2, prompts[2])],
    )
    pair.step(*(row(place, [LAST_SAMPLED], len(prompts[place]), tables[place]) for place in range(3)))


@pytest.mark.parametrize("layers", [1, 2], ids=["dense", "experts"])
def test_a_row_whose_logits_are_not_numbers_fails_alone(checkpoint_folder: Callable[[str], Path], layers: int) -> None:
    pair = RunnerPair(checkpoint_folder("v3"), layers=layers)
    pair.poison(POISON)
    prompts = [[2, 3, 4], [5, POISON, 6], [8, 9]]
    handles = pair.start(
        *(row(place, prompt, 0, [place]) for place, prompt in enumerate(prompts)),
        new=[new(place, prompt) for place, prompt in enumerate(prompts)],
    )
    # It was started before anyone knew.
    following = pair.start(*(row(place, [LAST_SAMPLED], len(prompt), [place]) for place, prompt in enumerate(prompts)))
    assert list(pair.finish(handles).errors) == [1]
    assert list(pair.finish(following).errors) == [1]


def test_its_blocks_and_its_seat_do_no_harm_to_the_next(pair: RunnerPair) -> None:
    pair.poison(POISON)
    pair.step(row(0, [POISON, 3, 4], 0, [2]), row(1, [5, 6], 0, [3]), new=[new(0, [POISON, 3, 4]), new(1, [5, 6])])
    result = pair.step(row(2, [8, 9], 0, [2]), row(1, [LAST_SAMPLED], 2, [3]), new=[new(2, [8, 9])], finished=[0])
    assert not result.errors
    pair.step(row(2, [LAST_SAMPLED], 2, [2]), row(1, [LAST_SAMPLED], 3, [3]))


def test_a_preempted_sequence_comes_back_with_other_blocks(pair: RunnerPair) -> None:
    prompts = short_prompts(2, 6)
    params = SamplingParams(temperature=0.9, frequency_penalty=1.0)
    tokens = [list(prompt) for prompt in prompts]

    def decode(tables: list[list[int]]) -> None:
        result = pair.step(*(row(place, one[-1:], len(one) - 1, tables[place]) for place, one in enumerate(tokens)))
        for one, drawn in zip(tokens, result.token_ids, strict=True):
            one += drawn

    result = pair.step(
        *(row(place, prompt, 0, [place]) for place, prompt in enumerate(prompts)),
        new=[new(place, prompt, params) for place, prompt in enumerate(prompts)],
    )
    for one, drawn in zip(tokens, result.token_ids, strict=True):
        one += drawn
    decode([[0], [1]])
    # The first one's block goes to the second, then it comes back and is computed again, with its output.
    other = new(2, [9])
    pair.step(row(1, tokens[1][-1:], len(tokens[1]) - 1, [1]), row(2, [9], 0, [0]), new=[other])
    tokens[1].append(3)
    result = pair.step(row(1, tokens[1][-1:], len(tokens[1]) - 1, [1]), row(0, tokens[0], 0, [8]), finished=[2])
    for place, drawn in zip((1, 0), result.token_ids, strict=True):
        tokens[place] += drawn
    decode([[8], [1]])


def test_one_that_comes_back_where_it_stood_reads_its_new_blocks(checkpoint_folder: Callable[[str], Path]) -> None:
    """Its beginning is found in the prefix cache, in another's block."""
    pair = RunnerPair(checkpoint_folder("v3"), layers=1, graph_tokens=32)
    prompt = random_token_ids(18, 4)
    fresh = [new(0, prompt), new(1, prompt)]
    pair.step(*(row(place, prompt[:16], 0, [place], sample=False) for place in range(2)), new=fresh)
    # The first block is overwritten by someone else.
    other = random_token_ids(16, 9)
    pair.step(row(2, other, 0, [0], sample=False), new=[new(2, other)])
    result = pair.step(row(0, prompt[16:], 16, [1, 5]), row(1, prompt[16:], 16, [1, 6]))
    assert result.token_ids[0] == result.token_ids[1]


def test_more_sequences_are_known_than_run_at_once(checkpoint_folder: Callable[[str], Path]) -> None:
    pair = RunnerPair(checkpoint_folder("v3"), layers=1, max_num_seqs=2)
    params = SamplingParams(temperature=0.8, presence_penalty=0.5, logprobs=1)
    prompts = short_prompts(5, 2)
    tokens = {}
    for pairing in ((0, 1), (2, 3), (4, 0), (1, 2), (3, 4)):
        rows, fresh = [], []
        for identity in pairing:
            if identity not in tokens:
                tokens[identity] = list(prompts[identity])
                fresh.append(new(identity, prompts[identity], params))
            # Each was preempted, and is computed from its beginning.
            rows.append(row(identity, tokens[identity], 0, [identity]))
        result = pair.step(*rows, new=fresh)
        for identity, drawn in zip(pairing, result.token_ids, strict=True):
            tokens[identity] += drawn


def test_tables_longer_than_a_steps_edits_arrive(checkpoint_folder: Callable[[str], Path], monkeypatch) -> None:
    from deepseek_engine.gpu import step_inputs

    monkeypatch.setattr(step_inputs, "EDITS", 3)
    pair = RunnerPair(checkpoint_folder("v3"), layers=1, graph_tokens=64, num_blocks=16)
    prompt = random_token_ids(50, 3)
    pair.step(row(0, prompt, 0, [9, 4, 7, 2]), row(1, [5], 0, [1]), new=[new(0, prompt), new(1, [5])])
    pair.step(row(0, [LAST_SAMPLED], 50, [9, 4, 7, 2]), row(1, [LAST_SAMPLED], 1, [1]))


def test_the_longest_steps_stay_within_a_sequences_context(checkpoint_folder: Callable[[str], Path]) -> None:
    """Beyond it there are neither places of the block tables nor rotations."""
    pair = RunnerPair(checkpoint_folder("v3"), layers=1, max_model_len=16, max_num_batched_tokens=40, num_blocks=64)
    seen: list[tuple[list[int], list[int]]] = []
    execute = pair.device.execute

    def watched(plan: StepPlan):
        if plan.rows:
            seen.append(([len(one.token_ids) for one in plan.rows], [one.start for one in plan.rows]))
        return execute(plan)

    pair.device.execute = watched
    pair.device.longest_steps()
    assert ([16, 16, 8], [0, 0, 8]) in seen
    assert all(count + start <= 16 for counts, starts in seen for count, start in zip(counts, starts, strict=True))
    # What was run leaves nothing behind.
    result = pair.step(row(0, [2, 3], 0, [0]), row(1, [4], 0, [1]), new=[new(0, [2, 3]), new(1, [4])])
    assert not result.errors
