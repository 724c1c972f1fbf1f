"""The runner on a GPU over an export: every kind of step, and what is bound when.

Without a GPU this file runs in Triton's interpreter (kernels/test_interpreter.py); the operators are torch then, in
float32.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from device_kernels import INTERPRETING, needs_device

pytest.importorskip("triton")
from deepseek_engine.step_plan import LAST_SAMPLED
from device_graph import device_decoder, write_device_graphs
from piccard_contract.sampling import SamplingParams
from random_checkpoints import random_token_ids
from runner_pair import RunnerPair, config_of, new, row

pytestmark = [
    needs_device,
    pytest.mark.skipif(not INTERPRETING, reason="the sessions without a GPU are for a runner without one"),
]
LAYERS = 2
TOLD = SamplingParams(temperature=0, logprobs=3, prompt_logprobs=2)
SEEDED = SamplingParams(temperature=0.8, seed=3, repetition_penalty=1.2, logprobs=0)


@pytest.mark.parametrize("family", ["v2_lite", "v3", "qwen2"])
def test_every_kind_of_step_gives_what_the_references_give(
    checkpoint_folder: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    folder = checkpoint_folder(family)
    config = config_of(folder, LAYERS)
    model, body, head = device_decoder(write_device_graphs(folder, config, tmp_path / "out"), config)
    pair = RunnerPair(folder, LAYERS, model=model)
    prompts = [random_token_ids(length, seed) for seed, length in enumerate((9, 3, 6))]
    tables = [[3, 1], [7], [2, 9]]
    # More tokens than a graph holds: each row is one sequence, whose numbers the host knows.
    result = pair.step(
        row(0, prompts[0], 0, tables[0], prompt_logprobs=range(1, 9)),
        row(1, prompts[1], 0, tables[1]),
        new=[new(0, prompts[0], TOLD), new(1, prompts[1], SEEDED)],
    )
    assert body.host_batches[-1] == [[9, 9], [3, 3]]
    # A decode beside a prompt, which comes a few queries at a time.
    result = pair.step(
        row(2, prompts[2], 0, tables[2]),
        row(0, result.token_ids[0], 9, tables[0]),
        row(1, result.token_ids[1], 3, tables[1]),
        new=[new(2, prompts[2])],
    )
    assert {rows for rows, _ in body.host_batches[-1]} == {4}
    # Decodes in a bucket of four; the next step names what they draw before anyone has read it.
    last = {2: result.token_ids[0], 0: result.token_ids[1], 1: result.token_ids[2]}
    lengths = {0: 10, 1: 4, 2: 6}
    first = pair.start(*(row(place, last[place], lengths[place], tables[place]) for place in (1, 0, 2)))
    assert {rows for rows, _ in body.host_batches[-1]} == {1}
    assert len(body.host_batches[-1]) == 4
    second = pair.start(row(1, [LAST_SAMPLED], 5, tables[1]))
    pair.finish(first)
    pair.finish(second)
    # The cache never moved, and each of its places was bound once.
    places = [f"{plane.name}_{layer}" for plane in model.cache_spec().planes for layer in range(LAYERS)]
    assert [body.bound[f"{place}{end}"] for place in places for end in ("", "_out")] == [1] * 2 * len(places)
    assert head.runs == body.runs + 1
