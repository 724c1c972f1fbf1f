"""The runner of device kernels against the one of references: every kind of step, for each family of latent attention.

Without a GPU this file runs in Triton's interpreter (kernels/test_interpreter.py), in float32.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from device_kernels import INTERPRETING, needs_device

pytest.importorskip("triton")
from piccard_contract.sampling import SamplingParams
from random_checkpoints import random_token_ids
from runner_pair import RunnerPair, new, row

pytestmark = needs_device
interpreted = pytest.mark.skipif(not INTERPRETING, reason="the interpreter alone computes in float32, as the reference")
FAMILIES = ("v2", "v2_lite", "v3")
TOLD = SamplingParams(temperature=0, logprobs=3, prompt_logprobs=2)
PLAIN = SamplingParams(temperature=0)
SEEDED = SamplingParams(temperature=0.8, seed=3, logprobs=0)


@interpreted
@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_step_gives_what_the_references_give(
    checkpoint_folder: Callable[[str], Path], family: str
) -> None:
    pair = RunnerPair(checkpoint_folder(family), layers=2)
    prompts = [random_token_ids(length, seed) for seed, length in enumerate((9, 3, 6))]
    tables = [[3, 1], [7], [2, 9]]
    # More tokens than a graph holds: prompts are attended to in the expanded form.
    result = pair.step(
        row(0, prompts[0], 0, tables[0], prompt_logprobs=range(1, 9)),
        row(1, prompts[1], 0, tables[1]),
        new=[new(0, prompts[0], TOLD), new(1, prompts[1], SEEDED)],
    )
    lengths = [13, 5]
    # A decode beside a prompt, which the decode kernel takes a few queries at a time; the order is kept.
    result = pair.step(
        row(2, prompts[2], 0, tables[2]),
        row(0, result.token_ids[0], 9, tables[0]),
        row(1, result.token_ids[1], 3, tables[1]),
        new=[new(2, prompts[2], PLAIN)],
    )
    last = {2: result.token_ids[0], 0: result.token_ids[1], 1: result.token_ids[2]}
    lengths = {0: 10, 1: 4, 2: 6}
    # Three decodes in a bucket of four.
    result = pair.step(*(row(place, last[place], lengths[place], tables[place]) for place in (1, 0, 2)))
    # One alone.
    pair.step(row(1, result.token_ids[0], 5, tables[1]))
