"""Whole models on a card, teacher-forced, against float64 on the CPU with the same weights."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from deepseek_engine.models import load_config
from deepseek_engine.settings import EngineSettings
from deepseek_engine.step_plan import NewSequence, StepPlan, StepRow
from piccard_contract.sampling import SamplingParams
from random_checkpoints import load_oracle, oracle_logits, random_token_ids
from safetensors.torch import load_file, save_file
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
FAMILIES = ("v2", "v2_lite", "v3", "llama", "qwen2", "qwen3")
TOKENS = 480
AGREEMENT = 0.99
"""Of the positions, the least share at which the same token is the most likely."""


@dataclass
class Told:
    """Of each position but the first: the most likely next token, and its log-probability."""

    tokens: Tensor
    logprobs: Tensor


def on_card(folder: Path, token_ids: list[int], chunks: list[int], *, long: bool) -> Told:
    from deepseek_engine.gpu.decoder import load_gpu_model
    from deepseek_engine.gpu_version import unserved
    from deepseek_engine.runners.cuda import CudaRunner

    config = load_config(folder)
    if (reason := unserved(config, torch.bfloat16)) is not None:
        pytest.skip(reason)
    model = load_gpu_model(folder, config, dtype=torch.bfloat16, device="cuda:0")
    runner = CudaRunner(model, EngineSettings(num_blocks=16, block_size=64, max_num_seqs=4))
    runner.capture()
    if long:
        # As many tokens as these would otherwise run from graphs.
        runner._graph_tokens = 1
    sequence = NewSequence(0, SamplingParams(temperature=0, prompt_logprobs=1), token_ids, [], 0, (), 1)
    tokens: list[int] = []
    logprobs: list[float] = []
    start = 0
    for count in chunks:
        stop = start + count
        wanted = range(start + 1, min(stop + 1, len(token_ids)))
        row = StepRow(0, token_ids[start:stop], start, list(range(8)), sample=stop == len(token_ids))
        row.prompt_logprobs = wanted if wanted else None
        result = runner.collect(runner.execute(StepPlan([row], new=[sequence] if start == 0 else [])))
        assert not result.errors
        if wanted:
            told = result.prompt_logprobs[0]
            tokens += [ids[1] for ids in told.token_ids]
            logprobs += [values[1] for values in told.logprobs]
        start = stop
    return Told(torch.tensor(tokens), torch.tensor(logprobs, dtype=torch.float64))


@pytest.fixture
def rounded(checkpoint_folder: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A family's checkpoint with its weights in bfloat16, so that both sides have the same ones."""

    def folder(family: str) -> Path:
        for file in checkpoint_folder(family).iterdir():
            if file.suffix == ".safetensors":
                weights = {name: weight.to(torch.bfloat16) for name, weight in load_file(file).items()}
                save_file(weights, tmp_path / file.name, metadata={"format": "pt"})
            else:
                shutil.copy(file, tmp_path / file.name)
        return tmp_path

    return folder


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunks", [[TOKENS], [1, 300, TOKENS - 301]], ids=["whole", "chunks"])
@pytest.mark.parametrize("long", [False, True], ids=["graphs", "long"])
def test_the_most_likely_tokens_are_those_of_float64(
    family: str, chunks: list[int], long: bool, rounded: Callable[[str], Path]
) -> None:
    folder = rounded(family)
    token_ids = random_token_ids(TOKENS, seed=3)
    told = on_card(folder, token_ids, chunks, long=long)
    oracle = load_oracle(folder)
    if hasattr(oracle, "set_experts_implementation"):
        # The one that takes float64.
        oracle.set_experts_implementation("eager")
    reference = oracle_logits(oracle.double(), token_ids).double().log_softmax(-1)[:-1]
    best = reference.max(dim=-1)
    own = reference.gather(-1, told.tokens.unsqueeze(-1)).squeeze(-1)
    error = (told.logprobs - own).abs()
    differs = told.tokens != best.indices
    assert float((~differs).double().mean()) >= AGREEMENT
    # Where the choice differs, float64 holds both tokens for as likely within the error of both log-probabilities.
    assert ((best.values - own)[differs] <= 2 * float(error.max())).all()
