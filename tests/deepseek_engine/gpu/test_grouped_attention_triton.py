"""Llama-, Qwen2- and Qwen3-shaped models with the device kernels, against the models and the runner of a CPU."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from device_kernels import DEVICE, INTERPRETING, needs_device

pytest.importorskip("triton")
from deepseek_engine.gpu.decoder import GpuDecoder
from deepseek_engine.models import load_config
from deepseek_engine.models.decoder import Decoder
from deepseek_engine.models.registry import build_model
from deepseek_engine.models.weights import Checkpoint
from deepseek_engine.runners.cuda import CudaRunner
from deepseek_engine.runners.torch import TorchRunner
from deepseek_engine.settings import EngineSettings
from deepseek_engine.step_plan import LAST_SAMPLED, NewSequence, RowLogprobs, StepPlan, StepResult, StepRow
from piccard_contract.sampling import SamplingParams
from random_checkpoints import random_token_ids

pytestmark = needs_device
PAGES = {"llama": 16, "qwen2": 32, "qwen3": 64, "llama_wide": 16}
"""Of each checkpoint the tokens a block; there are biases, norms of heads and eight heads of one key head."""
in_interpreter = pytest.mark.skipif(not INTERPRETING, reason="float32, in which results agree closely")
Folders = Callable[[str], Path]


def models(folder: Path) -> tuple[GpuDecoder, Decoder]:
    """The checkpoint's first two layers, since each costs seconds."""
    config = replace(load_config(folder), num_hidden_layers=2)
    checkpoints = [Checkpoint(folder, dtype=torch.float32, device=device) for device in (str(DEVICE), "cpu")]
    return GpuDecoder(config, checkpoints[0]), build_model(config, checkpoints[1])


def settings(family: str) -> EngineSettings:
    return EngineSettings(block_size=PAGES[family], num_blocks=24, max_num_seqs=6, max_num_batched_tokens=512)


@dataclass
class Script:
    """Plans whose rows are known before anything has run, since they name what was sampled last."""

    block_size: int
    used: int = 0

    def __post_init__(self) -> None:
        self.tables: dict[int, list[int]] = {}

    def table(self, sequence: int, tokens: int) -> list[int]:
        """A table of its own, the last block first."""
        blocks = -(-tokens // self.block_size)
        self.used += blocks
        self.tables[sequence] = list(range(self.used - 1, self.used - 1 - blocks, -1))
        return self.tables[sequence]

    def row(self, sequence: int, tokens: list[int], start: int, *, sample: bool = True) -> StepRow:
        known = range(max(start, 1), start + len(tokens)) if sequence == 0 and len(tokens) > 1 else None
        return StepRow(sequence, tokens, start, self.tables[sequence], sample, prompt_logprobs=known)

    def plans(self) -> list[StepPlan]:
        """Prompts, decodes, a prompt in two parts beside decodes, a sequence that was preempted, decodes again."""
        prompts = {number: random_token_ids(count, number) for number, count in enumerate((13, 2, 1, 14))}
        params = SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2, max_tokens=9)
        new = [NewSequence(number, params, prompt, [], 0, (), 7) for number, prompt in prompts.items()]
        for number, prompt in prompts.items():
            self.table(number, len(prompt) + 9)
        last = [LAST_SAMPLED]
        plans = [
            StepPlan([self.row(number, prompts[number], 0) for number in range(3)], new=new[:3]),
            StepPlan([self.row(2, last, 1), self.row(0, last, 13), self.row(1, last, 2)]),
            StepPlan(
                [self.row(0, last, 14), self.row(3, prompts[3][:9], 0, sample=False), self.row(2, last, 2)],
                new=new[3:],
            ),
            StepPlan([self.row(3, prompts[3][9:], 9), self.row(2, last, 3), self.row(0, last, 15)], finished=[1]),
        ]
        # Its blocks were taken: it starts again elsewhere, the token that it sampled last included.
        self.table(3, 23)
        plans.append(StepPlan([self.row(0, last, 16), self.row(3, [*prompts[3], LAST_SAMPLED], 0)], finished=[2]))
        plans.append(StepPlan([self.row(3, last, 15), self.row(0, last, 17)]))
        return plans


def run(runner: CudaRunner | TorchRunner, family: str) -> list[StepResult]:
    """Each step is launched before the last one is read, where the runner allows it."""
    handles, results = [], []
    for plan in Script(PAGES[family]).plans():
        handles.append(runner.execute(plan))
        if len(handles) >= runner.steps_in_flight:
            results.append(runner.collect(handles.pop(0)))
    return [*results, *(runner.collect(handle) for handle in handles)]


def check_logprobs(got: dict[int, RowLogprobs], expected: dict[int, RowLogprobs]) -> None:
    assert got.keys() == expected.keys()
    for row, parts in expected.items():
        assert got[row].token_ids == parts.token_ids
        assert got[row].ranks == parts.ranks
        torch.testing.assert_close(torch.tensor(got[row].logprobs), torch.tensor(parts.logprobs), atol=1e-4, rtol=0)


@in_interpreter
@pytest.mark.parametrize("graph_tokens", [512, 6], ids=["short", "long"])
@pytest.mark.parametrize("family", PAGES)
def test_steps_give_what_they_give_on_a_cpu(checkpoint_folder: Folders, family: str, graph_tokens: int) -> None:
    model, reference = models(checkpoint_folder(family))
    expected = run(TorchRunner(reference, settings(family)), family)
    runner = CudaRunner(model, settings(family))
    runner._graph_tokens = graph_tokens
    got = run(runner, family)
    assert [result.token_ids for result in got] == [result.token_ids for result in expected]
    assert sum(len(tokens) for result in got for tokens in result.token_ids) == 15
    for mine, theirs in zip(got, expected, strict=True):
        check_logprobs(mine.logprobs, theirs.logprobs)
        check_logprobs(mine.prompt_logprobs, theirs.prompt_logprobs)
        assert not mine.errors


def test_the_cache_has_the_planes_of_the_cpus_model(checkpoint_folder: Folders) -> None:
    model, reference = models(checkpoint_folder("qwen3"))
    assert model.cache_spec() == reference.cache_spec()
