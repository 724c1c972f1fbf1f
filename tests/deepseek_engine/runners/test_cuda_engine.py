"""The engine over the runner of device kernels, two steps under way, against the one over references."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from device_kernels import INTERPRETING, needs_device

pytest.importorskip("triton")
from deepseek_engine.engine import Engine
from deepseek_engine.request import EngineRequest
from deepseek_engine.runners.base import ModelRunner
from deepseek_engine.runners.torch import TorchRunner
from deepseek_engine.settings import EngineSettings
from random_checkpoints import random_token_ids
from runner_pair import TOLERANCE, device_model, device_runner, reference_model
from toy_model import Transcript, collect, drain, run, toy_request
from toy_tokenizer import toy_tokenizer

pytestmark = [
    needs_device,
    pytest.mark.skipif(not INTERPRETING, reason="the interpreter alone computes in float32, as the reference"),
]
SETTINGS: dict[str, Any] = {
    "num_blocks": 32,
    "max_model_len": 64,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 24,
    "prefill_chunk": 8,
    "prefill_gap": None,
}


def engines(folder: Path, **changes: Any) -> tuple[Engine, Engine]:
    """One over device kernels, one over references; one dense layer."""
    settings = EngineSettings(**{**SETTINGS, **changes})

    def engine(runner: ModelRunner) -> Engine:
        return Engine(runner, toy_tokenizer(), settings)

    device = device_runner(device_model(folder, layers=1), settings, graph_tokens=8)
    assert device.steps_in_flight == 2
    return engine(device), engine(TorchRunner(reference_model(folder, layers=1), settings))


def mixture() -> list[EngineRequest]:
    """Three at once and one that waits: greedy, seeded with penalties, two choices; short and long prompts."""
    return [
        toy_request("greedy", random_token_ids(20, 1), temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1),
        toy_request("seeded", random_token_ids(3, 2), seed=4, max_tokens=4, frequency_penalty=1.0, top_k=50),
        toy_request("choices", random_token_ids(7, 3), seed=5, n=2, max_tokens=3, logit_bias={9: 2.0}, min_tokens=2),
    ]


def same(found: dict[tuple[str, int], Transcript], expected: dict[tuple[str, int], Transcript]) -> None:
    assert found.keys() == expected.keys()
    for name, transcript in expected.items():
        assert found[name].token_ids == transcript.token_ids
        assert found[name].text == transcript.text
        assert found[name].last.finish_reason == transcript.last.finish_reason
        assert len(found[name].logprobs) == len(transcript.logprobs)
        for one, other in zip(found[name].logprobs, transcript.logprobs, strict=True):
            assert one.keys() == other.keys()
            for token, told in other.items():
                assert one[token].rank == told.rank
                assert one[token].logprob == pytest.approx(told.logprob, abs=TOLERANCE)


def test_a_mixture_of_requests_gets_the_same_text(checkpoint_folder: Callable[[str], Path]) -> None:
    device, reference = engines(checkpoint_folder("v3"))
    same(run(device, *mixture()), run(reference, *mixture()))


def test_preempted_sequences_come_back_to_other_blocks_and_seats(checkpoint_folder: Callable[[str], Path]) -> None:
    device, reference = engines(checkpoint_folder("v3"))
    requests = [
        toy_request(str(place), random_token_ids(6, place), seed=place, max_tokens=3, ignore_eos=True)
        for place in range(3)
    ]
    for request in requests:
        device.add(request)
    outputs = []
    for name in ("0", "1"):
        outputs += device.step()
        device.preempt(name)
    outputs += drain(device)
    assert device.stats().preemptions == 2
    same(collect(outputs), run(reference, *requests))


def test_an_abort_between_steps_does_no_harm_to_the_others(checkpoint_folder: Callable[[str], Path]) -> None:
    device, reference = engines(checkpoint_folder("v3"))
    prompts = [random_token_ids(2, place) for place in range(3)]
    requests = [toy_request(str(place), prompt, temperature=0, max_tokens=4) for place, prompt in enumerate(prompts)]
    for request in requests:
        device.add(request)
    outputs = device.step()
    device.abort("1")
    outputs += drain(device)
    found, expected = collect(outputs), run(reference, *requests)
    assert found.pop(("1", 0)).last.finish_reason == "abort"
    expected.pop(("1", 0))
    same(found, expected)
