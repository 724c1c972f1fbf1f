"""A stream resumed elsewhere after any token goes on exactly as the unbroken one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_model import ToyModel, generate, toy_engine

PROMPT = list(range(60, 100))
LENGTH = 24

# Peaked logits make runs of likely tokens, so that penalties and stop strings bite.
CASES = {
    "greedy": {"temperature": 0},
    "seeded": {"seed": 7},
    "filters": {"seed": 7, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "temperature": 0.8},
    "penalties": {"seed": 7, "repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": 0.4},
    "greedy penalties": {"temperature": 0, "repetition_penalty": 1.4, "frequency_penalty": 0.6},
    "min_tokens": {"seed": 7, "min_tokens": 15, "logit_bias": {257: 30.0}, "ignore_eos": False},
    "logprobs": {"seed": 7, "logprobs": 3},
    "with prompt logprobs": {"seed": 7, "logprobs": 1, "prompt_logprobs": 1},
    "special tokens told": {"seed": 7, "skip_special_tokens": False, "logit_bias": {256: 4.0}},
}


def unbroken(**params):
    return generate(PROMPT, **params)


def check_every_seam(params):
    whole = unbroken(**params)
    for cut in range(1, len(whole.token_ids)):
        rest = generate(PROMPT, output_ids=whole.token_ids[:cut], **params)
        sent = "".join(output.text for output in whole.outputs[:cut])
        assert rest.token_ids == whole.token_ids[cut:], cut
        assert sent + rest.text == whole.text, cut
        assert rest.last.num_output_tokens == whole.last.num_output_tokens
        assert (rest.last.finish_reason, rest.last.stop_reason) == (whole.last.finish_reason, whole.last.stop_reason)
        assert rest.logprobs == whole.logprobs[cut:]
        assert rest.last.num_prompt_tokens == len(PROMPT)
        assert all(output.prompt_logprobs is None for output in rest.outputs)
        if whole.last.cumulative_logprob is None:
            assert rest.last.cumulative_logprob is None
        else:
            assert rest.last.cumulative_logprob == pytest.approx(whole.last.cumulative_logprob, abs=1e-3)
    return whole


@pytest.mark.parametrize("name", CASES)
def test_every_seam(name):
    whole = check_every_seam({"max_tokens": LENGTH, "ignore_eos": True, **CASES[name]})
    assert len(whole.token_ids) in (LENGTH, 16)


@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 1000), start=st.integers(2, 14), length=st.integers(1, 4), include=st.booleans())
def test_a_stop_string_across_the_seam(seed, start, length, include):
    params = {"max_tokens": LENGTH, "ignore_eos": True, "seed": seed}
    text = unbroken(**params).text
    stop = text[start : start + length]
    whole = check_every_seam({**params, "stop": [stop, "never"], "include_stop_str_in_output": include})
    assert whole.last.stop_reason == stop
    assert whole.text == text[: text.index(stop) + (len(stop) if include else 0)]


@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 1000), place=st.integers(3, 20))
def test_a_stop_token(seed, place):
    params = {"max_tokens": LENGTH, "ignore_eos": True, "seed": seed}
    token = unbroken(**params).token_ids[place]
    whole = check_every_seam({**params, "stop_token_ids": [token]})
    assert whole.last.stop_reason == token


@pytest.mark.parametrize("params", [{"max_tokens": 8}, {"stop": ["a"], "max_tokens": 100}, {"logit_bias": {257: 90.0}}])
def test_a_stream_that_had_ended_ends_again_without_new_tokens(params):
    params = {"seed": 11, **params}
    whole = unbroken(**params)
    rest = generate(PROMPT, output_ids=whole.token_ids, **params)
    assert (rest.token_ids, rest.text, len(rest.outputs)) == ([], "", 1)
    assert (rest.last.finish_reason, rest.last.stop_reason) == (whole.last.finish_reason, whole.last.stop_reason)


def test_a_resumed_stream_may_reuse_prefixes_and_be_preempted():
    params = {"max_tokens": LENGTH, "ignore_eos": True, "seed": 5, "logprobs": 0}
    engine = toy_engine(ToyModel(), max_num_batched_tokens=16, max_num_seqs=4)
    whole = generate(PROMPT, engine=engine, **params)
    rest = generate(PROMPT, engine=engine, output_ids=whole.token_ids[:10], **params)
    assert rest.token_ids == whole.token_ids[10:]
    assert rest.last.num_cached_tokens == 32
    assert rest.last.cumulative_logprob == pytest.approx(whole.last.cumulative_logprob, abs=1e-3)
