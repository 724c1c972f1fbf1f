"""The batch-invariant mode: a sequence's numbers are the same bits whatever runs beside it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from device_kernels import ON_GPU, needs_device

pytest.importorskip("triton")
from deepseek_engine.runners.cuda import CudaRunner
from deepseek_engine.runners.torch import TorchRunner
from deepseek_engine.settings import EngineSettings
from deepseek_engine.step_plan import RowLogprobs, StepPlan
from piccard_contract.sampling import SamplingParams
from random_checkpoints import random_token_ids
from runner_pair import agree, device_model, device_runner, new, reference_model, row

pytestmark = needs_device
COUNT = 64 if ON_GPU else 3
SETTINGS = EngineSettings(num_blocks=COUNT, max_num_seqs=COUNT, max_num_batched_tokens=512)
PARAMS = SamplingParams(temperature=0, logprobs=4, prompt_logprobs=2)
PROMPTS = [random_token_ids(6 - place % 4, place) for place in range(COUNT)]
TABLES = [[COUNT - 1 - place] for place in range(COUNT)]


def told(runner: CudaRunner, present: list[int], forced: list[int]) -> list[RowLogprobs]:
    """What the first sequence is told of its prompt and of the tokens that follow, which are `forced`."""
    fresh = [new(place, PROMPTS[place], PARAMS) for place in present]
    chunks = [row(place, PROMPTS[place], 0, TABLES[place]) for place in present]
    chunks[present.index(0)].prompt_logprobs = range(1, len(PROMPTS[0]))
    result = runner.collect(runner.execute(StepPlan(chunks, new=fresh)))
    parts = [result.prompt_logprobs[present.index(0)], result.logprobs[present.index(0)]]
    for step, token in enumerate(forced):
        rows = [row(place, [token], len(PROMPTS[place]) + step, TABLES[place]) for place in present]
        result = runner.collect(runner.execute(StepPlan(rows)))
        parts.append(result.logprobs[present.index(0)])
    return parts


@pytest.mark.parametrize("layers", [1, 2], ids=["dense", "experts"])
def test_numbers_are_the_same_bits_alone_and_beside_others(
    checkpoint_folder: Callable[[str], Path], layers: int
) -> None:
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    model = device_model(checkpoint_folder("v3"), layers, dtype, batch_invariant=True)
    alone = told(device_runner(model, SETTINGS), [0], [12, 40])
    # The product that the interpreter takes a tile's by rounds by a row's place in it, which tensor cores do not.
    beside = [*range(40, COUNT), *range(40)] if ON_GPU else [0, 2, 1]
    assert told(device_runner(model, SETTINGS), beside, [12, 40]) == alone


@pytest.mark.skipif(ON_GPU, reason="the interpreter alone computes in float32, as the reference")
def test_they_are_the_references(checkpoint_folder: Callable[[str], Path]) -> None:
    folder = checkpoint_folder("v2")
    device = device_runner(device_model(folder, 2, batch_invariant=True), SETTINGS)
    reference = TorchRunner(reference_model(folder, 2), SETTINGS)
    for place in range(2):
        plans = [
            StepPlan([row(place, PROMPTS[place], 0, TABLES[place])], new=[new(place, PROMPTS[place], PARAMS)]),
            StepPlan([row(place, [12], len(PROMPTS[place]), TABLES[place])]),
        ]
        for plan in plans:
            agree(device.collect(device.execute(plan)), reference.collect(reference.execute(plan)))
