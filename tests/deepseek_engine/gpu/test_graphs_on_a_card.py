"""On a card: what graphs replay is what their kernels give one by one, and once warm nothing is made any more.

Both for the decoder of device kernels and for an export in onnxruntime-gpu.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from device_kernels import ON_GPU

pytest.importorskip("triton")
from card_export import exported_decoder
from deepseek_engine.engine import Engine
from deepseek_engine.gpu.device_model import DeviceModel
from deepseek_engine.kernels import launcher
from deepseek_engine.runners.cuda import CudaRunner
from deepseek_engine.settings import EngineSettings
from deepseek_engine.step_plan import LAST_SAMPLED, StepPlan, StepResult
from piccard_contract.sampling import SamplingParams
from random_checkpoints import random_token_ids
from runner_pair import device_model, device_runner, new, row
from toy_model import drain, toy_request
from toy_tokenizer import toy_tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="needs a GPU")]
LAYERS = 3
FAMILIES = ("v2", "v2_lite", "v3")
SETTINGS = EngineSettings(num_blocks=256, max_num_seqs=8, max_num_batched_tokens=1024, prefill_gap=None)
PARAMS = (
    SamplingParams(temperature=0, logprobs=5, prompt_logprobs=1),
    SamplingParams(temperature=1.0, top_p=0.9, logprobs=2),
    SamplingParams(temperature=0.7, frequency_penalty=1.0, logit_bias={9: 3.0}, min_tokens=3, logprobs=0),
    SamplingParams(temperature=1.3, top_k=20, min_p=0.01, repetition_penalty=1.2, logprobs=1),
    SamplingParams(temperature=0, logprobs=0),
)


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, checkpoint_folder: Callable[[str], Path]) -> Path:
    return checkpoint_folder(request.param)


@pytest.fixture(params=["torch", "onnxruntime"])
def model(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> DeviceModel:
    if request.param == "torch":
        return device_model(folder, LAYERS, torch.bfloat16)
    return exported_decoder(folder, LAYERS, tmp_path / "export")


def plans() -> list[StepPlan]:
    """Steps of every kind and of several sizes; tokens that no one knows yet are named by the step before."""
    lengths = (700, 40, 17, 5, 1)
    prompts = [random_token_ids(length % 400 + 1, place) for place, length in enumerate(lengths)]
    tables = [list(range(place * 32, place * 32 + 32)) for place in range(len(prompts))]
    sequences = [new(place, prompt, PARAMS[place]) for place, prompt in enumerate(prompts)]
    done = [0] * len(prompts)

    def share(place: int, count: int = 1) -> Any:
        start, prompt = done[place], prompts[place]
        done[place] += count
        if start >= len(prompt):
            return row(place, [LAST_SAMPLED], start, tables[place])
        told = range(start + 1, min(start + count + 1, len(prompt))) if place == 0 else None
        reaches_end = start + count == len(prompt)
        return row(place, prompt[start : start + count], start, tables[place], sample=reaches_end, prompt_logprobs=told)

    steps = [StepPlan([share(1, 41), share(2, 18)], new=sequences[1:3])]
    steps.append(StepPlan([share(1), share(3, 6), share(2)], new=[sequences[3]]))
    steps.append(StepPlan([share(2), share(4, 2), share(1), share(3)], new=[sequences[4]]))
    steps += [StepPlan([share(place) for place in order]) for order in ((1, 2, 3, 4), (4, 3, 2, 1), (2, 3, 1, 4))]
    # A long prompt beside decodes, in chunks that graphs hold.
    steps.append(StepPlan([share(1), share(0, 200), share(2), share(3), share(4)], new=[sequences[0]]))
    steps.append(StepPlan([share(0, 101), *(share(place) for place in (1, 2, 3, 4))]))
    steps += [StepPlan([share(place) for place in range(5)]) for _ in range(4)]
    steps.append(StepPlan([share(0)], finished=[1, 2, 3, 4]))
    return steps


def results(runner: CudaRunner) -> list[StepResult]:
    """Each step is started before the last one is collected, as the engine does."""
    handles = []
    found = []
    for plan in plans():
        handles.append(runner.execute(plan))
        if len(handles) == runner.steps_in_flight:
            found.append(runner.collect(handles.pop(0)))
    return found + [runner.collect(handle) for handle in handles]


def cache_bits(runner: CudaRunner) -> torch.Tensor:
    return runner._cache["latent"].view(torch.int16)


def test_a_replay_equals_its_kernels_bit_for_bit(model: DeviceModel) -> None:
    captured, eager = (device_runner(model, SETTINGS) for _ in range(2))
    captured.capture()
    eager.eager = True
    found, expected = results(captured), results(eager)
    assert captured.graphs.replays >= len(plans())
    assert eager.graphs.replays == 0
    assert found == expected
    assert torch.equal(cache_bits(captured), cache_bits(eager))


def test_what_no_step_has_written_is_not_read(model: DeviceModel) -> None:
    poisoned, clean = device_runner(model, SETTINGS), CudaRunner(model, SETTINGS)
    found = results(poisoned)
    assert not any(result.errors for result in found)
    assert found == results(clean)
    written = cache_bits(clean) != 0
    assert torch.equal(cache_bits(poisoned)[written], cache_bits(clean)[written])


def test_nothing_is_captured_or_compiled_once_warm(model: DeviceModel) -> None:
    runner = CudaRunner(model, SETTINGS)
    runner.precompile()
    runner.longest_steps()
    runner.capture()
    warm = launcher.compilations(), runner.graphs.captures
    assert warm[1] > 0
    engine = Engine(runner, toy_tokenizer(), SETTINGS)
    lengths = (1, 2, 3, 15, 16, 17, 33, 64, 100, 129, 200, 255, 300, 400, 7, 490, 480, 470, 5, 31)
    outputs = []
    for place, length in enumerate(lengths):
        params = PARAMS[place % len(PARAMS)].model_dump(exclude_unset=True)
        changes = {**params, "max_tokens": 3 + 5 * place % 20, "ignore_eos": True, "seed": place}
        engine.add(toy_request(str(place), random_token_ids(length, place), **changes))
        # Some come together, others while the batch is of any size.
        for _ in range(place % 4):
            outputs += engine.step()
    outputs += drain(engine)
    reasons = {output.finish_reason for output in outputs if output.finish_reason is not None}
    assert reasons == {"length"}
    assert (launcher.compilations(), runner.graphs.captures) == warm
    assert runner.graphs.replays > 0


def test_known_sequences_beyond_the_graphs_tables_are_drawn_all_the_same(model: DeviceModel) -> None:
    """Their penalties' table has grown, and graphs know the old one."""
    runner, eager = (device_runner(model, SETTINGS) for _ in range(2))
    runner.capture()
    eager.eager = True
    params = SamplingParams(temperature=0.9, frequency_penalty=1.5)
    found = []
    for one in (runner, eager):
        fresh = [new(place, [place + 2, 9], params) for place in range(20)]
        told = []
        for first in range(0, 20, 4):
            rows = [row(place, [place + 2, 9], 0, [place]) for place in range(first, first + 4)]
            told.append(one.collect(one.execute(StepPlan(rows, new=fresh))))
            fresh = []
            rows = [row(place, [LAST_SAMPLED], 2, [place]) for place in range(first, first + 4)]
            told.append(one.collect(one.execute(StepPlan(rows))))
        found.append(told)
    assert found[0] == found[1]
