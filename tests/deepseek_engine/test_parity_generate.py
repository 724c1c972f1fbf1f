"""Greedy output of the whole engine against transformers' `generate`, 64 tokens on every family, however it is run."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from deepseek_engine.engine import Engine
from deepseek_engine.models import load_model
from deepseek_engine.runners.torch import TorchRunner
from deepseek_engine.settings import EngineSettings
from random_checkpoints import FAMILIES, load_oracle, random_token_ids
from toy_model import collect, run, toy_request
from toy_tokenizer import toy_tokenizer

NEW_TOKENS = 64
PROMPTS = {str(length): random_token_ids(length, seed=length) for length in (3, 33, 90)}

# Sequences that run at once, and the tokens of a step.
WAYS = {
    "chunks of 1": {"max_num_seqs": 1, "max_num_batched_tokens": 1},
    "chunks of 7": {"max_num_batched_tokens": 7, "prefill_chunk": 7},
    "chunks of 64": {"max_num_batched_tokens": 64, "prefill_chunk": 64},
    "whole": {"max_num_batched_tokens": 512, "prefill_chunk": 512},
    "no prefix reuse": {"enable_prefix_caching": False},
    "blocks of 64": {"block_size": 64, "prefill_chunk": 16},
    "two steps": {"steps_in_flight": 2},
    "two steps, chunks of 7": {"steps_in_flight": 2, "max_num_batched_tokens": 7, "prefill_chunk": 7},
}


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest, checkpoint_folder: Callable[[str], Path]) -> Path:
    return checkpoint_folder(request.param)


@cache
def expected(folder: Path) -> dict[str, list[int]]:
    """transformers' greedy continuation of each prompt."""
    oracle = load_oracle(folder)
    oracle.generation_config.eos_token_id = None
    texts = {}
    for name, prompt in PROMPTS.items():
        output = oracle.generate(
            torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, use_cache=True, pad_token_id=0
        )
        texts[name] = output[0, len(prompt) :].tolist()
    return texts


@cache
def loaded(folder: Path):
    return load_model(folder, dtype=torch.float32)


def engine_of(folder: Path, steps_in_flight=1, **changes) -> Engine:
    settings = EngineSettings(
        **{"num_blocks": 64, "max_model_len": 256, "max_num_seqs": 3, "prefill_gap": None, **changes}
    )
    runner = TorchRunner(loaded(folder), settings)
    runner.steps_in_flight = steps_in_flight
    return Engine(runner, toy_tokenizer(), settings)


def requests():
    return [
        toy_request(name, prompt, temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        for name, prompt in PROMPTS.items()
    ]


def tokens(transcripts):
    return {name: transcript.token_ids for (name, _), transcript in transcripts.items()}


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_of_unequal_lengths(family, way):
    assert tokens(run(engine_of(family, **WAYS[way]), *requests())) == expected(family)


def test_prefixes_reused(family):
    engine = engine_of(family)
    run(engine, *requests())
    again = run(engine, *requests())
    assert tokens(again) == expected(family)
    assert {name: one.last.num_cached_tokens for (name, _), one in again.items()} == {"3": 0, "33": 32, "90": 80}


@pytest.mark.parametrize(("caching", "steps_in_flight"), [(True, 1), (False, 1), (True, 2), (False, 2)])
def test_preempted_in_the_middle(family, caching, steps_in_flight):
    engine = engine_of(family, steps_in_flight, enable_prefix_caching=caching, max_num_batched_tokens=48)
    for request in requests():
        engine.add(request)
    outputs, step = [], 0
    while engine.has_work():
        if step in (2, 20, 37):
            for name in PROMPTS:
                engine.preempt(name)
        outputs.extend(engine.step())
        step += 1
    assert tokens(collect(outputs)) == expected(family)
    assert engine.stats().preemptions >= 6


def test_resumed_in_the_middle(family):
    answers = expected(family)
    resumed = [
        toy_request(name, prompt, output_ids=answers[name][:30], temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        for name, prompt in PROMPTS.items()
    ]
    assert tokens(run(engine_of(family), *resumed)) == {name: answer[30:] for name, answer in answers.items()}
