"""Whole models on a card, teacher-forced, against float64 on the CPU with the same weights.

bfloat16 moves logits by some hundredths, so where two tokens are nearly as likely either may come first, and where two
experts are, either may be chosen. Positions with another choice of experts are counted apart; elsewhere tokens may
differ only where float64 holds them for as likely within the error, and no more often than in torch's own bfloat16.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from deepseek_engine.models import load_config, load_model
from deepseek_engine.models.mixture_of_experts import MixtureOfExperts
from deepseek_engine.settings import EngineSettings
from deepseek_engine.step_plan import NewSequence, StepPlan, StepRow
from paged_sequences import PagedSequences
from piccard_contract.sampling import SamplingParams
from random_checkpoints import load_oracle, oracle_logits
from safetensors.torch import load_file, save_file
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DEMO = Path(__file__).parents[3] / "assets" / "demo"
FAMILIES = ("v2", "v2_lite", "v3", "llama", "qwen2", "qwen3", "llama_wide", "qwen3_wide", "demo")
TOKENS = 480
SPREAD = 0.015
"""By how much less often than torch's bfloat16 a small model may agree: seven of 480 positions."""


@dataclass
class Told:
    """Of each position but the last: the most likely next token, its log-probability, and each layer's experts."""

    tokens: Tensor
    logprobs: Tensor
    experts: list[Tensor]
    """int64 [tokens, top_k], sorted."""


def on_card(folder: Path, token_ids: list[int], chunks: list[int], *, long: bool) -> Told:
    from deepseek_engine.gpu.decoder import load_gpu_model
    from deepseek_engine.gpu.fusions import capability_of, kernel_obstacle
    from deepseek_engine.runners.cuda import CudaRunner

    config = load_config(folder)
    device = torch.device("cuda", 0)
    obstacle = kernel_obstacle(config, device, torch.bfloat16, capability_of(device))
    if obstacle is not None:
        pytest.skip(obstacle.reason)
    model = load_gpu_model(folder, config, dtype=torch.bfloat16, device="cuda:0")
    runner = CudaRunner(model, EngineSettings(num_blocks=16, block_size=64, max_num_seqs=4))
    # Kernel by kernel, which gives what graphs give, so that the choices can be seen.
    runner.eager = True
    if long:
        # As many tokens as these would otherwise run from graphs.
        runner._graph_tokens = 1
    chosen: dict[int, list[Tensor]] = {}
    top_k = getattr(config, "num_experts_per_tok", 0)
    count = 0
    model.observe_experts(
        lambda layer, experts: chosen.setdefault(layer, []).append(experts[:count, :top_k].long().sort(-1).values.cpu())
    )
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
    experts = [torch.cat(parts)[:-1] for _, parts in sorted(chosen.items())]
    return Told(torch.tensor(tokens), torch.tensor(logprobs, dtype=torch.float64), experts)


def in_torch(folder: Path, token_ids: list[int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> Told:
    """The references on the CPU."""
    experts: list[Tensor] = []
    route = MixtureOfExperts.route

    def seen(self: MixtureOfExperts, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = route(self, x)
        experts.append(chosen.sort(-1).values[:-1])
        return weights, chosen

    with monkeypatch.context() as patch:
        patch.setattr(MixtureOfExperts, "route", seen)
        sequences = PagedSequences(load_model(folder, dtype=dtype), [len(token_ids)])
        best = sequences.step({0: token_ids})[0].double().log_softmax(-1)[:-1].max(dim=-1)
    return Told(best.indices, best.values, experts)


@pytest.fixture
def rounded(checkpoint_folder: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A family's checkpoint with its weights in bfloat16, so that all sides have the same ones."""

    def folder(family: str) -> Path:
        for file in (DEMO if family == "demo" else checkpoint_folder(family)).iterdir():
            if file.suffix == ".safetensors":
                weights = {name: weight.to(torch.bfloat16) for name, weight in load_file(file).items()}
                save_file(weights, tmp_path / file.name, metadata={"format": "pt"})
            elif file.is_file():
                shutil.copy(file, tmp_path / file.name)
        return tmp_path

    return folder


def text_ids(family: str, folder: Path) -> list[int]:
    """The demo reads what it was trained for, the others random tokens."""
    if family != "demo":
        vocabulary = load_config(folder).vocab_size
        return torch.randint(2, vocabulary, (TOKENS,), generator=torch.Generator().manual_seed(3)).tolist()
    from deepseek_engine.text.tokenizer import Tokenizer

    return Tokenizer.from_folder(folder).encode(Path(__file__).read_text(encoding="utf-8"))[:TOKENS]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunks", [[TOKENS], [1, 300, TOKENS - 301]], ids=["whole", "chunks"])
@pytest.mark.parametrize("long", [False, True], ids=["short", "long"])
def test_the_most_likely_tokens_are_those_of_float64(
    family: str, chunks: list[int], long: bool, rounded: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = rounded(family)
    token_ids = text_ids(family, folder)
    oracle = load_oracle(folder)
    if hasattr(oracle, "set_experts_implementation"):
        # The one that takes float64.
        oracle.set_experts_implementation("eager")
    exact = oracle_logits(oracle.double(), token_ids).double().log_softmax(-1)[:-1]
    best = exact.max(dim=-1)
    plain = in_torch(folder, token_ids, torch.float32, monkeypatch)
    half = in_torch(folder, token_ids, torch.bfloat16, monkeypatch)
    told = on_card(folder, token_ids, chunks, long=long)
    flipped = torch.zeros(len(token_ids) - 1, dtype=torch.bool)
    for own, right in zip(told.experts, plain.experts, strict=True):
        flipped |= (own != right).any(-1)
    same = told.tokens == best.indices
    agreement, usual = float(same.double().mean()), float((half.tokens == best.indices).double().mean())
    own_values = exact.gather(-1, told.tokens.unsqueeze(-1)).squeeze(-1)
    error = (told.logprobs - own_values).abs()[~flipped].max()
    margins = (best.values - own_values)[~same & ~flipped]
    print(
        f"{family}: agreement {agreement:.4f}, torch's bfloat16 {usual:.4f}; other experts at {int(flipped.sum())} of"
        f" {len(flipped)}; error {float(error):.3f}, largest margin {float(margins.max()) if len(margins) else 0.0:.3f}"
    )
    assert agreement >= usual - SPREAD
    assert (margins <= 2 * error).all()
