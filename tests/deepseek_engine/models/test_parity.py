"""Every family gives transformers' logits, however its tokens are cut into steps."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from deepseek_engine.kernels import moe_experts
from deepseek_engine.models import latent_attention, load_model
from paged_sequences import PagedSequences, chunked_logits
from random_checkpoints import FAMILIES, VARIANTS, load_oracle, oracle_logits, random_token_ids
from safetensors.torch import load_file, save_file
from torch import Tensor

TOLERANCE = 1e-4
TOKENS = random_token_ids(100, seed=1)
WHOLE = len(TOKENS)

Folder = Callable[[str], Path]
Expected = Callable[[str, list[int]], Tensor]


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_sharp_enough_to_show_mistakes(family: str, expected_logits: Expected) -> None:
    assert expected_logits(family, TOKENS).std() > 1.0


@pytest.mark.parametrize("chunk", [1, 7, 64, WHOLE])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_for_every_chunk_size(
    family: str, chunk: int, checkpoint_folder: Folder, expected_logits: Expected
) -> None:
    model = load_model(checkpoint_folder(family), dtype=torch.float32)
    assert difference(chunked_logits(model, TOKENS, chunk), expected_logits(family, TOKENS)) < TOLERANCE


@pytest.mark.parametrize("family", ["v2_lite", "v3", "qwen2"])
def test_weights_that_are_packed(family: str, checkpoint_folder: Folder, tmp_path: Path) -> None:
    """Weights from bfloat16, as real checkpoints have them, are multiplied in their packed form."""
    shutil.copy(checkpoint_folder(family) / "config.json", tmp_path)
    weights = load_file(checkpoint_folder(family) / "model.safetensors")
    rounded = {name: weight.bfloat16().float() for name, weight in weights.items()}
    save_file(rounded, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load_model(tmp_path, dtype=torch.float32)
    expected = oracle_logits(load_oracle(tmp_path), TOKENS)
    for chunk in (1, 7, WHOLE):
        assert difference(chunked_logits(model, TOKENS, chunk), expected) < TOLERANCE


@pytest.mark.parametrize("chunk", [1, 16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_variants(variant: str, chunk: int, checkpoint_folder: Folder, expected_logits: Expected) -> None:
    model = load_model(checkpoint_folder(variant), dtype=torch.float32)
    assert difference(chunked_logits(model, TOKENS, chunk), expected_logits(variant, TOKENS)) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_unequal_length_share_steps(family: str, checkpoint_folder: Folder, expected_logits: Expected) -> None:
    """Prompts of several lengths, whole and in chunks, beside rows that decode, over a cache that held NaN before."""
    model = load_model(checkpoint_folder(family), dtype=torch.float32)
    prompts = [random_token_ids(length, seed=length) for length in (1, 16, 37, 90)]
    sequences = PagedSequences(model, [len(prompt) for prompt in prompts], seed=3, poison=float("nan"))
    found: list[list[Tensor]] = [[] for _ in prompts]
    sizes = [[1], [15, 1], [20, 5, *[1] * 12], [50, 9, *[1] * 31]]
    while any(sizes):
        chunks = {}
        for row, left in enumerate(sizes):
            if left:
                done = sequences.filled[row]
                chunks[row] = prompts[row][done : done + left.pop(0)]
        for row, logits in sequences.step(chunks).items():
            found[row].append(logits)
    for prompt, logits in zip(prompts, found, strict=True):
        assert difference(torch.cat(logits), expected_logits(family, prompt)) < TOLERANCE


@pytest.mark.parametrize("family", ["v2", "v3", "qwen3"])
def test_contexts_of_very_different_length_decode_together(
    family: str, checkpoint_folder: Folder, expected_logits: Expected
) -> None:
    model = load_model(checkpoint_folder(family), dtype=torch.float32)
    prompts = [random_token_ids(length, seed=length) for length in (3, 500, 4, 5, 90)]
    sequences = PagedSequences(model, [len(prompt) for prompt in prompts], poison=float("nan"))
    sequences.step({row: prompt[:-1] for row, prompt in enumerate(prompts)})
    last = sequences.step({row: prompt[-1:] for row, prompt in enumerate(prompts)})
    for row, prompt in enumerate(prompts):
        assert difference(last[row], expected_logits(family, prompt)[-1:]) < TOLERANCE


@pytest.mark.parametrize("block_size", [1, 32, 64])
@pytest.mark.parametrize("family", ["v3", "llama"])
def test_block_sizes(family: str, block_size: int, checkpoint_folder: Folder, expected_logits: Expected) -> None:
    model = load_model(checkpoint_folder(family), dtype=torch.float32)
    found = chunked_logits(model, TOKENS, 33, block_size=block_size, seed=block_size)
    assert difference(found, expected_logits(family, TOKENS)) < TOLERANCE


def test_decoding_without_absorbed_projections(
    checkpoint_folder: Folder, expected_logits: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large models keep W_UK and W_UV apart."""
    monkeypatch.setattr(latent_attention, "ABSORBED_BYTES", -(2**60))
    model = load_model(checkpoint_folder("v3"), dtype=torch.float32)
    assert difference(chunked_logits(model, TOKENS[:40], 1), expected_logits("v3", TOKENS)[:40]) < TOLERANCE


@pytest.mark.parametrize("dense_tokens", [0, WHOLE])
def test_either_way_of_running_experts(
    dense_tokens: int, checkpoint_folder: Folder, expected_logits: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe_experts, "DENSE_TOKENS", dense_tokens)
    model = load_model(checkpoint_folder("v2"), dtype=torch.float32)
    assert difference(chunked_logits(model, TOKENS, WHOLE), expected_logits("v2", TOKENS)) < TOLERANCE


@pytest.mark.parametrize("family", ["v2_lite", "v3", "qwen2", "qwen3"])
def test_bfloat16_stays_near(family: str, checkpoint_folder: Folder, expected_logits: Expected) -> None:
    """An expert that flips at a near-tie moves a token's logits a lot, so the median over tokens is looked at."""
    model = load_model(checkpoint_folder(family), dtype=torch.bfloat16)
    found, expected = chunked_logits(model, TOKENS, 16), expected_logits(family, TOKENS)
    assert found.dtype == torch.float32
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.median() < 0.05


def test_logits_of_no_rows(checkpoint_folder: Folder) -> None:
    model = load_model(checkpoint_folder("v3"), dtype=torch.float32)
    assert model.logits(torch.zeros(0, model.config.hidden_size)).shape == (0, model.config.vocab_size)
