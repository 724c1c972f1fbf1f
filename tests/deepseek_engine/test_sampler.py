"""The batched sampler against each row sampled by itself, and its per-sequence state."""

import math

import numpy as np
import pytest
import torch
from deepseek_engine.random_numbers import uniform
from deepseek_engine.sampler import Sampler
from deepseek_engine.step_plan import NewSequence
from hypothesis import given, settings
from hypothesis import strategies as st
from piccard_contract.sampling import SamplingParams
from sampling_reference import reference_logits

VOCABULARY = 50
EOS = 7

PARAMETERS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        "top_k": st.integers(-1, 60),
        "top_p": st.floats(0.05, 1.0),
        "min_p": st.floats(0.0, 0.5),
        "repetition_penalty": st.sampled_from([1.0, 0.7, 1.5]),
        "frequency_penalty": st.sampled_from([0.0, -1.0, 1.5]),
        "presence_penalty": st.sampled_from([0.0, -1.0, 1.5]),
        "logit_bias": st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-10, 10), max_size=3),
        "min_tokens": st.integers(0, 5),
        "stop_token_ids": st.lists(st.integers(0, VOCABULARY - 1), max_size=2),
        "logprobs": st.integers(0, 5),
    },
)


def sequence(identity, params, prompt=(1, 2, 3), output=(), seed=5, choice=0):
    return NewSequence(identity, SamplingParams(**params), list(prompt), list(output), choice, (EOS,), seed)


def random_logits(seed, rows):
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


def sampler_of(*sequences):
    sampler = Sampler(VOCABULARY, torch.device("cpu"))
    for one in sequences:
        sampler.add(one)
    return sampler


@settings(deadline=None, max_examples=100)
@given(st.lists(PARAMETERS, min_size=1, max_size=6), st.integers(0, 2**31))
def test_a_batch_samples_what_each_row_samples_alone(parameters, seed):
    rows = [
        sequence(place, params, prompt=range(place + 1), output=range(place), seed=place, choice=place)
        for place, params in enumerate(parameters)
    ]
    together = sampler_of(*rows)
    alone = [sampler_of(row) for row in rows]
    for step in range(4):
        logits = random_logits(seed + step, len(rows))
        sample = together.sample(logits, list(range(len(rows))))
        told = sample.row_logprobs()
        assert sample.errors() == {}
        for place, sampler in enumerate(alone):
            single = sampler.sample(logits[place : place + 1], [place])
            assert single.tokens.tolist() == [int(sample.tokens[place])]
            assert single.row_logprobs().get(0) == told.get(place)


@settings(deadline=None, max_examples=150)
@given(PARAMETERS, st.integers(0, 2**31))
def test_a_row_is_the_reference_step_by_step(params, seed):
    one = sequence(0, params, prompt=(3, 4, 5), output=(5, 6), seed=seed)
    sampler = sampler_of(one)
    output = [5, 6]
    for step in range(4):
        logits = random_logits(seed + step, 1)
        token = int(sampler.sample(logits, [0]).tokens[0])
        exact = reference_logits(logits[0].numpy(), one.params, [3, 4, 5], output, (EOS,))
        if one.params.greedy:
            assert exact[token] == pytest.approx(exact.max(), abs=1e-5)
        else:
            weights = np.exp(exact - exact.max())
            cumulated = np.concatenate(([0.0], np.cumsum(weights / weights.sum())))
            number = uniform(seed, 0, len(output))
            assert cumulated[token] - 1e-5 <= number <= cumulated[token + 1] + 1e-5
        output.append(token)


@given(st.integers(0, 2**31), st.integers(0, 10))
@settings(deadline=None, max_examples=40)
def test_a_resumed_sequence_goes_on_as_it_would_have(seed, cut):
    params = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2, "min_tokens": 6}
    steps = [random_logits(seed + step, 1) for step in range(12)]
    whole = sampler_of(sequence(0, params, seed=seed))
    tokens = [int(whole.sample(logits, [0]).tokens[0]) for logits in steps]
    resumed = sampler_of(sequence(0, params, output=tokens[:cut], seed=seed))
    assert [int(resumed.sample(logits, [0]).tokens[0]) for logits in steps[cut:]] == tokens[cut:]


def test_min_tokens_masks_end_and_stop_tokens_until_it_is_reached():
    sampler = sampler_of(sequence(0, {"temperature": 0, "min_tokens": 2, "stop_token_ids": [9]}))
    logits = torch.zeros(1, VOCABULARY)
    logits[0, [EOS, 9, 11]] = torch.tensor([9.0, 8.0, 1.0])
    assert [int(sampler.sample(logits, [0]).tokens[0]) for _ in range(3)] == [11, 11, EOS]


def test_a_token_mask_leaves_only_what_it_names():
    sampler = sampler_of(sequence(0, {"temperature": 0}), sequence(1, {"temperature": 0}))
    logits = random_logits(0, 2)
    allowed = np.zeros(VOCABULARY, dtype=np.uint8)
    allowed[[13, 31]] = 1
    mask = np.packbits(allowed, bitorder="little").tobytes()
    sample = sampler.sample(logits, [0, 1], {1: mask})
    best = 13 if logits[1, 13] > logits[1, 31] else 31
    assert sample.tokens.tolist() == [int(logits[0].argmax()), best]


def test_a_mask_that_leaves_nothing_fails_its_row_alone():
    sampler = sampler_of(sequence(0, {}), sequence(1, {"temperature": 0}))
    sample = sampler.sample(random_logits(0, 2), [0, 1], {0: bytes(7)})
    assert list(sample.errors()) == [0]
    assert "leave no token" in sample.errors()[0]


def ends_of_ranges():
    """Each number that a request may send, at both ends of what the contract takes; None is left out."""
    for name, field in SamplingParams.model_json_schema()["properties"].items():
        for kind in field.get("anyOf", [field]):
            for end in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
                if end in kind and name not in ("n", "max_tokens", "prompt_logprobs"):
                    inside = {"exclusiveMinimum": 1e-300, "exclusiveMaximum": -1}.get(end, 0)
                    yield {name: kind[end] + inside}


@pytest.mark.parametrize("params", list(ends_of_ranges()), ids=str)
@pytest.mark.parametrize("temperature", [0, 1.01e-5, 1.0])
def test_what_the_contract_takes_fails_no_row(params, temperature):
    """A request with the most extreme number is sampled, and so is who shares its step."""
    extreme = {"temperature": temperature, "max_tokens": None} | params
    ordinary = {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 3, "logprobs": 1}
    sampler = sampler_of(sequence(0, extreme, output=[4, 4]), sequence(1, ordinary))
    assert sampler.sample(random_logits(2, 2) * 20, [0, 1]).errors() == {}


@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {}, {"top_p": 0.5}, {"repetition_penalty": 2.0}, {"logprobs": 2}]
)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_numbers_fail_their_row_alone(params, bad):
    sampler = sampler_of(*(sequence(place, params) for place in range(3)))
    logits = random_logits(1, 3)
    expected = sampler_of(*(sequence(place, params) for place in range(3))).sample(logits, [0, 1, 2]).tokens
    broken = logits.clone()
    broken[1, 17] = bad
    sample = sampler.sample(broken, [0, 1, 2])
    assert list(sample.errors()) == [1]
    assert "not numbers" in sample.errors()[1]
    assert sample.tokens[[0, 2]].tolist() == expected[[0, 2]].tolist()


@given(st.integers(1, 200), st.integers(0, 2**32 - 1))
def test_of_equal_logits_the_first_is_taken(vocabulary, seed):
    logits = torch.randint(-2, 3, (3, vocabulary), generator=torch.Generator().manual_seed(seed)).float()
    sampler = Sampler(vocabulary, torch.device("cpu"))
    for place in range(3):
        sampler.add(sequence(place, {"temperature": 0}))
    first = [row.index(max(row)) for row in logits.tolist()]
    sample = sampler.sample(logits, [0, 1, 2])
    assert sample.tokens.tolist() == first
    assert sample.peaks.tolist() == [max(row) for row in logits.tolist()]


def test_logprobs_are_of_the_raw_logits():
    sampler = sampler_of(sequence(0, {"temperature": 0, "logprobs": 1, "logit_bias": {4: 100.0}}))
    logits = random_logits(2, 1)
    told = sampler.sample(logits, [0]).row_logprobs()[0]
    exact = logits[0].log_softmax(-1)
    assert told.token_ids == [[4, int(exact.argmax())]]
    assert told.logprobs[0] == pytest.approx([float(exact[4]), float(exact.max())])


def test_rows_of_the_penalty_table_are_clean_when_they_are_used_again():
    sampler = sampler_of()
    logits = random_logits(3, 1)
    params = {"temperature": 0, "frequency_penalty": 2.0}
    for identity in range(20):
        sampler.add(sequence(identity, params))
        fresh = sampler_of(sequence(identity, params))
        for _ in range(5):
            assert (
                sampler.sample(logits, [identity]).tokens.tolist() == fresh.sample(logits, [identity]).tokens.tolist()
            )
        sampler.remove(identity)
        sampler.remove(identity)
