"""A stream resumed elsewhere after any token goes on exactly as the unbroken one."""

import pytest
from deepseek_engine.text.output_text import OutputText
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_model import ToyModel, generate, toy_engine, toy_request
from toy_tokenizer import toy_tokenizer

pytestmark = pytest.mark.usefixtures("steps_in_flight")

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
    """Whoever sent the last token without the end sent what that token releases, and not what the end releases."""
    params = {"seed": 11, **params}
    whole = unbroken(**params)
    rest = generate(PROMPT, output_ids=whole.token_ids, **params)
    told = [token for token in whole.token_ids if token < 256]
    sent, _ = OutputText(toy_tokenizer(), params.get("stop", ())).push(told)
    assert (rest.token_ids, sent + rest.text, len(rest.outputs)) == ([], whole.text, 1)
    assert (rest.last.finish_reason, rest.last.stop_reason) == (whole.last.finish_reason, whole.last.stop_reason)


def test_a_resumed_stream_may_reuse_prefixes_and_be_preempted():
    params = {"max_tokens": LENGTH, "ignore_eos": True, "seed": 5, "logprobs": 0}
    engine = toy_engine(ToyModel(), max_num_batched_tokens=16, max_num_seqs=4)
    whole = generate(PROMPT, engine=engine, **params)
    rest = generate(PROMPT, engine=engine, output_ids=whole.token_ids[:10], **params)
    assert rest.token_ids == whole.token_ids[10:]
    assert rest.last.num_cached_tokens == 32
    assert rest.last.cumulative_logprob == pytest.approx(whole.last.cumulative_logprob, abs=1e-3)


def test_cached_tokens_are_those_of_the_prompt():
    params = {"max_tokens": LENGTH + 40, "ignore_eos": True, "seed": 5}
    engine = toy_engine()
    whole = generate(PROMPT, engine=engine, **params)
    rest = generate(PROMPT, engine=engine, output_ids=whole.token_ids[:50], **params)
    assert rest.last.num_cached_tokens == len(PROMPT)


@pytest.mark.parametrize("cut", range(1, 10))
def test_what_a_failed_engine_held_back_is_told_by_the_next(cut, monkeypatch, steps_in_flight):
    """Half a character and the beginning of a stop string are not told with the failure."""
    params = {"max_tokens": 12, "temperature": 0, "logit_bias": bias_to("ab\u20acnd"), "stop": ["bd", "dn"]}
    whole = unbroken(**params)
    engine = toy_engine()
    engine.add(toy_request("r", PROMPT, **params))
    outputs = [output for _ in range(cut) for output in engine.step()]
    monkeypatch.setattr(engine._runner, "execute", lambda plan: 1 / 0)
    outputs += engine.step()
    assert outputs[-1].error is not None
    # A step that was started before the one that failed still tells its token.
    told = [token for output in outputs for token in output.token_ids]
    assert told == whole.token_ids[: cut + steps_in_flight - 1]
    sent = "".join(output.text for output in outputs)
    rest = generate(PROMPT, output_ids=told, **params)
    assert sent + rest.text == whole.text


def bias_to(text):
    """A bias that leaves only the bytes of `text`, so that whole characters and stop strings turn up."""
    return dict.fromkeys(toy_tokenizer().encode(text, add_special_tokens=False), 40.0)
