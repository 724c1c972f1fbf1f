"""The engine over a toy model whose logits do not depend on how its tokens are cut into steps."""

import numpy as np
import pytest
import torch
from deepseek_engine.engine import Engine
from deepseek_engine.request import EngineRequest
from deepseek_engine.runners.torch import TorchRunner
from deepseek_engine.settings import EngineSettings
from hypothesis import given, settings
from hypothesis import strategies as st
from piccard_contract.errors import ErrorCode, RequestError
from piccard_contract.sampling import SamplingParams
from toy_model import ToyConfig, ToyModel, collect, drain, generate, run, toy_engine, toy_request
from toy_tokenizer import EOS, toy_tokenizer

pytestmark = pytest.mark.usefixtures("steps_in_flight")

PROMPT = list(range(40, 90))
FEW = settings(deadline=None, max_examples=15)


def test_greedy_text_is_the_argmax_chain():
    model = ToyModel()
    transcript = generate(PROMPT, engine=toy_engine(model), temperature=0, max_tokens=12, ignore_eos=True)
    tokens = list(PROMPT)
    for token in transcript.token_ids:
        total = sum((one + 1) * (place * 37 + 11) for place, one in enumerate(tokens))
        assert token == int(model.logits(torch.tensor([[float(total % 8191)]])).argmax())
        tokens.append(token)
    assert transcript.text == toy_tokenizer().decode(transcript.token_ids)
    assert transcript.last.finish_reason == "length"
    assert [output.num_output_tokens for output in transcript.outputs] == list(range(1, 13))


@FEW
@given(
    chunk=st.sampled_from([1, 7, 64, 512]),
    seed=st.integers(0, 2**31),
    others=st.lists(st.integers(1, 80), max_size=5),
    caching=st.booleans(),
    size=st.sampled_from([16, 32]),
)
def test_a_seeded_text_is_the_same_whatever_else_runs(chunk, seed, others, caching, size):
    params = {"seed": seed, "max_tokens": 25, "frequency_penalty": 0.3, "top_p": 0.95}
    alone = generate(PROMPT, **params)
    engine = toy_engine(
        max_num_batched_tokens=max(chunk, 8),
        prefill_chunk=chunk,
        max_num_seqs=8,
        enable_prefix_caching=caching,
        block_size=size,
    )
    company = [toy_request(f"other {place}", PROMPT[:length], max_tokens=length) for place, length in enumerate(others)]
    together = run(engine, *company, toy_request("r", PROMPT, **params))["r", 0]
    assert (together.token_ids, together.text) == (alone.token_ids, alone.text)


@FEW
@given(seed=st.integers(0, 2**31), at=st.sets(st.integers(1, 24), min_size=1, max_size=5), caching=st.booleans())
def test_preemption_does_not_change_outputs(seed, at, caching):
    params = {"seed": seed, "max_tokens": 25, "ignore_eos": True, "repetition_penalty": 1.2, "logprobs": 1}
    params["prompt_logprobs"] = 1
    alone = generate(PROMPT, **params)
    engine = toy_engine(enable_prefix_caching=caching, max_num_batched_tokens=16, max_num_seqs=2)
    engine.add(toy_request("r", PROMPT, **params))
    outputs, step = [], 0
    while engine.has_work():
        if step in at:
            engine.preempt("r")
        outputs.extend(engine.step())
        step += 1
    again = collect(outputs)["r", 0]
    assert again.token_ids == alone.token_ids
    assert again.logprobs == alone.logprobs
    assert again.outputs[0].prompt_logprobs == alone.outputs[0].prompt_logprobs
    assert engine.stats().preemptions > 0


def test_a_pool_too_small_for_all_preempts_and_ends_everything_as_alone():
    requests = [toy_request(str(place), [place] * 60, seed=place, max_tokens=60) for place in range(6)]
    alone = [generate([place] * 60, seed=place, max_tokens=60).token_ids for place in range(6)]
    engine = toy_engine(num_blocks=16, max_model_len=128, enable_prefix_caching=False)
    transcripts = run(engine, *requests)
    assert [transcripts[str(place), 0].token_ids for place in range(6)] == alone
    assert engine.stats().preemptions > 0
    assert engine.stats().free_blocks == 16


@pytest.mark.parametrize("num_prompt", [1, 16, 17, 31, 32, 33, 100])
def test_prefix_reuse_does_not_change_outputs(num_prompt):
    prompt = [place % 200 for place in range(num_prompt)]
    params = {"seed": 3, "max_tokens": 10, "ignore_eos": True}
    alone = generate(prompt, engine=toy_engine(enable_prefix_caching=False), **params)
    engine = toy_engine()
    first, second = generate(prompt, engine=engine, **params), generate(prompt, engine=engine, **params)
    assert first.token_ids == second.token_ids == alone.token_ids
    assert first.last.num_cached_tokens == 0
    assert second.last.num_cached_tokens == (num_prompt - 1) // 16 * 16
    assert engine.stats().prefix_hit_tokens == second.last.num_cached_tokens


def test_a_turn_that_goes_on_from_an_answer_reuses_the_answer():
    engine = toy_engine()
    first = generate(PROMPT, engine=engine, temperature=0, max_tokens=30, ignore_eos=True)
    second = generate([*PROMPT, *first.token_ids, 5], engine=engine, temperature=0, max_tokens=2)
    assert second.last.num_cached_tokens == 64


def test_salts_do_not_share_prefixes():
    engine = toy_engine()
    for salt, cached in (("a", 0), ("b", 0), ("a", 48)):
        outputs = run(engine, toy_request(salt, PROMPT, salt=salt, max_tokens=1))
        assert outputs[salt, 0].last.num_cached_tokens == cached


@pytest.mark.parametrize("caching", [True, False])
def test_choices_differ_share_the_prompt_and_repeat_with_the_seed(caching):
    def choices():
        model = ToyModel()
        engine = toy_engine(model, enable_prefix_caching=caching)
        transcripts = run(engine, toy_request("r", PROMPT, n=3, seed=9, max_tokens=12, prompt_logprobs=0))
        return [transcripts["r", choice] for choice in range(3)], sum(map(sum, model.steps)), engine

    first, computed, engine = choices()
    again, _, _ = choices()
    assert [one.token_ids for one in first] == [one.token_ids for one in again]
    assert len({tuple(one.token_ids) for one in first}) == 3
    # The full prompt once, then for the others only what lies past its last full block.
    assert computed <= 50 + 2 * 2 + 3 * 11
    assert [one.outputs[0].prompt_logprobs is not None for one in first] == [True, False, False]
    assert engine.stats().free_blocks == engine.stats().total_blocks


def test_the_first_choice_is_what_one_choice_would_be():
    many = run(toy_engine(), toy_request("r", PROMPT, n=2, seed=4, max_tokens=9))
    assert many["r", 0].token_ids == generate(PROMPT, seed=4, max_tokens=9).token_ids


def test_unseeded_requests_differ():
    texts = {tuple(generate(PROMPT, max_tokens=10, seed=None).token_ids) for _ in range(3)}
    assert len(texts) == 3


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prompt_logprobs_are_right_with_prefix_reuse_too(caching, chunk):
    model = ToyModel()
    engine = toy_engine(
        model,
        enable_prefix_caching=caching,
        prefill_chunk=chunk,
        max_num_batched_tokens=chunk,
        max_num_seqs=1,
    )
    generate(PROMPT, engine=engine, max_tokens=3)
    transcript = generate(PROMPT, engine=engine, temperature=0, max_tokens=3, prompt_logprobs=2, logprobs=2)
    told = transcript.outputs[0].prompt_logprobs
    assert told[0] is None
    assert len(told) == len(PROMPT)
    assert all(output.prompt_logprobs is None for output in transcript.outputs[1:])
    total = 0
    for place, token in enumerate(PROMPT[:-1]):
        total += (token + 1) * (place * 37 + 11)
        exact = model.logits(torch.tensor([[float(total % 8191)]]))[0].double().log_softmax(-1)
        entry = told[place + 1]
        assert entry[PROMPT[place + 1]].logprob == pytest.approx(float(exact[PROMPT[place + 1]]), abs=1e-5)
        best = [one for one in entry.values() if one.rank == 1]
        assert best[0].token_id == int(exact.argmax())
    assert [next(iter(entry)) for entry in transcript.logprobs] == transcript.token_ids
    assert transcript.last.cumulative_logprob == pytest.approx(
        sum(entry[token].logprob for entry, token in zip(transcript.logprobs, transcript.token_ids, strict=True))
    )


def test_a_prompt_of_one_token_has_one_empty_prompt_logprob():
    assert generate([5], max_tokens=1, prompt_logprobs=3).outputs[0].prompt_logprobs == [None]


def test_end_of_sequence_stops_and_is_not_told_as_text():
    bias = {"logit_bias": {EOS: 100.0}}
    transcript = generate(PROMPT, max_tokens=5, **bias)
    assert (transcript.token_ids, transcript.text) == ([EOS], "")
    assert (transcript.last.finish_reason, transcript.last.stop_reason) == ("stop", None)
    assert generate(PROMPT, max_tokens=5, ignore_eos=True, **bias).token_ids == [EOS] * 5
    held = generate(PROMPT, max_tokens=9, min_tokens=4, **bias)
    assert held.token_ids[4:] == [EOS]
    assert EOS not in held.token_ids[:4]


def test_a_stop_token_is_the_reason_and_its_text_comes_only_when_asked_for():
    free = generate(PROMPT, temperature=0, max_tokens=12, ignore_eos=True)
    token = free.token_ids[5]
    place = free.token_ids.index(token)
    params = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "stop_token_ids": [token]}
    stopped = generate(PROMPT, **params)
    assert stopped.token_ids == free.token_ids[: place + 1]
    assert (stopped.last.finish_reason, stopped.last.stop_reason) == ("stop", token)
    assert stopped.text == toy_tokenizer().decode(free.token_ids[:place])
    told = generate(PROMPT, include_stop_str_in_output=True, **params)
    assert told.text == toy_tokenizer().decode(free.token_ids[: place + 1])


def bytes_of(text):
    """The tokens of `text`, one a byte."""
    return toy_tokenizer().encode(text, add_special_tokens=False)


class SpellingModel(ToyModel):
    """Writes a given text after a prompt of given length."""

    def __init__(self, text, num_prompt):
        super().__init__()
        self._tokens = bytes_of(text)
        self._num_prompt = num_prompt

    def forward(self, batch, cache):
        return (batch.positions - self._num_prompt + 1).to(torch.float64).unsqueeze(-1)

    def logits(self, hidden):
        logits = torch.zeros(len(hidden), self.config.vocab_size)
        for row, place in enumerate(hidden.squeeze(-1).long().tolist()):
            logits[row, self._tokens[place] if 0 <= place < len(self._tokens) else EOS] = 50.0
        return logits


def spell(text, **params):
    engine = toy_engine(SpellingModel(text, len(PROMPT)))
    return generate(PROMPT, engine=engine, temperature=0, max_tokens=100, **params)


def test_stop_strings_end_the_text_and_never_leak():
    transcript = spell("one two STOP three", stop=["STOP", "STUB"])
    assert transcript.text == "one two "
    assert (transcript.last.finish_reason, transcript.last.stop_reason) == ("stop", "STOP")
    assert len(transcript.token_ids) == len("one two STOP")
    assert spell("one STOP", stop=["STOP"], include_stop_str_in_output=True).text == "one STOP"
    assert spell("one STO", stop=["STOP"]).text == "one STO"
    assert spell("STOP two STOP", stop=["STOP"], min_tokens=6).text == "STOP two "


def test_characters_are_never_split():
    text = "né 深海 🐙!"
    transcript = spell(text)
    assert transcript.text == text
    assert all("�" not in output.text for output in transcript.outputs)
    assert len(transcript.outputs) > len(text)


def test_without_detokenize_there_are_tokens_and_no_text():
    transcript = spell("hello", detokenize=False)
    assert transcript.text == ""
    assert transcript.token_ids == [*bytes_of("hello"), EOS]


def test_max_tokens_none_goes_to_the_end_of_the_context():
    transcript = generate(PROMPT, engine=toy_engine(max_model_len=80), max_tokens=None, ignore_eos=True)
    assert len(transcript.token_ids) == 30
    assert transcript.last.finish_reason == "length"


def test_abort_gives_the_blocks_back_and_is_told_once():
    engine = toy_engine(max_num_seqs=2)
    before = engine.stats().free_blocks
    for name in "abc":
        engine.add(toy_request(name, PROMPT, n=2, max_tokens=100, ignore_eos=True))
    outputs = [output for _ in range(5) for output in engine.step()]
    for name in ("a", "c", "a", "unknown"):
        engine.abort(name)
    told = engine.step()
    ends = [(output.request_id, output.choice) for output in told if output.finish_reason == "abort"]
    assert ends == [("a", 0), ("a", 1), ("c", 0), ("c", 1)]
    transcripts = collect(outputs + told + drain(engine))
    assert all(transcripts["b", choice].last.finish_reason == "length" for choice in range(2))
    assert engine.stats().free_blocks == before
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)


def test_nan_logits_end_only_their_request_and_leave_no_trace():
    poison = 200
    model = ToyModel(poison=poison)
    engine = toy_engine(model, num_blocks=12, max_model_len=192)
    sound = toy_request("sound", PROMPT, seed=1, max_tokens=20)
    transcripts = run(engine, toy_request("broken", [*PROMPT, poison], max_tokens=20), sound)
    error = transcripts["broken", 0].last.error
    assert transcripts["broken", 0].last.finish_reason == "error"
    assert error.code is ErrorCode.NUMERICAL_ERROR
    assert "not numbers" in error.message
    alone = generate(PROMPT, seed=1, max_tokens=20)
    assert transcripts["sound", 0].token_ids == alone.token_ids
    assert engine.stats().free_blocks == 12
    # Every block is used again, those that held NaN included.
    crowd = [toy_request(str(place), PROMPT, seed=1, max_tokens=20, salt=str(place)) for place in range(6)]
    assert all(one.token_ids == alone.token_ids for one in run(engine, *crowd).values())


def test_a_poisoned_prefix_is_not_shared():
    poison = 200
    engine = toy_engine(ToyModel(poison=poison), max_num_batched_tokens=16, max_num_seqs=4)
    prompt = [poison, *PROMPT]
    assert run(engine, toy_request("first", prompt))["first", 0].last.error is not None
    assert engine.stats().cached_blocks == 0


def test_a_step_that_raises_ends_its_requests_and_the_engine_goes_on(caplog):
    engine = toy_engine(ToyModel(explosive=201))
    transcripts = run(engine, toy_request("bad", [1, 2, 201]))
    error = transcripts["bad", 0].last.error
    assert error.code is ErrorCode.INTERNAL
    assert "the toy exploded" not in error.message
    assert "the toy exploded" in caplog.text
    assert (
        run(engine, toy_request("good", PROMPT, max_tokens=3, ignore_eos=True))["good", 0].last.finish_reason
        == "length"
    )
    assert engine.stats().free_blocks == engine.stats().total_blocks


def test_a_device_that_is_lost_ends_the_engine():
    class Lost(ToyModel):
        def forward(self, batch, cache):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    engine = toy_engine(Lost())
    engine.add(toy_request("x", PROMPT))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.step()


def test_a_refused_launch_fails_its_step_with_cudas_words_and_the_engine_goes_on():
    class Refused(ToyModel):
        def forward(self, batch, cache):
            if int(batch.token_ids[0]) == 7:
                raise torch.AcceleratorError("CUDA error: invalid configuration argument\nadvice")
            return super().forward(batch, cache)

    engine = toy_engine(Refused())
    error = run(engine, toy_request("bad", [7, 8]))["bad", 0].last.error
    assert error.code is ErrorCode.INTERNAL
    assert "(CUDA: invalid configuration argument)" in error.message
    assert generate(PROMPT, engine=engine, max_tokens=2, ignore_eos=True).last.finish_reason == "length"


def test_running_out_of_memory_has_its_own_code():
    class Greedy(ToyModel):
        def forward(self, batch, cache):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    transcript = generate(PROMPT, engine=toy_engine(Greedy()))
    assert transcript.last.error.code is ErrorCode.OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (toy_request("x", []), ErrorCode.MISSING_INPUT),
        (toy_request("x", [260]), ErrorCode.INVALID_TOKEN),
        (toy_request("x", [-1]), ErrorCode.INVALID_TOKEN),
        (toy_request("x", [1], output_ids=[999]), ErrorCode.INVALID_TOKEN),
        (toy_request("x", [1], stop_token_ids=[999]), ErrorCode.INVALID_TOKEN),
        (toy_request("x", [1], logit_bias={999: 1.0}), ErrorCode.INVALID_TOKEN),
        (toy_request("x", [1] * 500, max_tokens=13), ErrorCode.CONTEXT_LENGTH_EXCEEDED),
        (toy_request("x", [1] * 512, max_tokens=None), ErrorCode.CONTEXT_LENGTH_EXCEEDED),
        (toy_request("x", [1], output_ids=[1], n=2), ErrorCode.INVALID_VALUE),
        (toy_request("x", [1], output_ids=[1] * 9, max_tokens=8), ErrorCode.INVALID_VALUE),
        (toy_request("taken", [1]), ErrorCode.INVALID_VALUE),
    ],
)
def test_bad_requests_are_refused_and_leave_nothing_behind(request_, code):
    engine = toy_engine()
    engine.add(toy_request("taken", PROMPT, max_tokens=2))
    before = engine.stats()
    with pytest.raises(RequestError) as caught:
        engine.add(request_)
    assert caught.value.code is code
    assert engine.stats() == before
    assert {name for name, _ in collect(drain(engine))} == {"taken"}


def test_an_id_may_be_used_again_once_it_has_ended():
    engine = toy_engine()
    for _ in range(2):
        assert generate(PROMPT, engine=engine, max_tokens=2).last.finish_reason is not None


def test_settings_that_do_not_fit_the_model_are_refused():
    wrong = EngineSettings(num_blocks=4, max_model_len=100)
    with pytest.raises(ValueError, match="cache"):
        Engine(TorchRunner(ToyModel(), wrong), toy_tokenizer(), wrong)


def test_priorities_decide_who_runs_first():
    engine = toy_engine(max_num_seqs=1)
    for name, priority in (("low", 5), ("high", -5)):
        engine.add(EngineRequest(name, PROMPT, SamplingParams(max_tokens=2), priority=priority))
    ends = [output.request_id for output in drain(engine) if output.finish_reason]
    assert ends == ["high", "low"]


def test_what_the_engine_draws_follows_the_models_distribution():
    class Fixed(ToyModel):
        def logits(self, hidden):
            return torch.tensor([[1.0, 0.5, 0.0, -0.5]]).expand(len(hidden), -1)

    engine = toy_engine(
        Fixed(ToyConfig(vocab_size=4, eos_token_ids=())), num_blocks=1024, max_num_seqs=128, max_model_len=128
    )
    requests = [toy_request(str(seed), [1], seed=seed, max_tokens=50) for seed in range(100)]
    tokens = [token for one in run(engine, *requests).values() for token in one.token_ids]
    counts = np.bincount(tokens, minlength=4)
    expected = np.exp([1.0, 0.5, 0.0, -0.5])
    expected *= 5000 / expected.sum()
    # 3 degrees of freedom: the 0.999 quantile of chi-square is 16.27.
    assert ((counts - expected) ** 2 / expected).sum() < 16.27
