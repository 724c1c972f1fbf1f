"""The parity tolerance bites: each named mistake moves logits by more than a hundred tolerances."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from deepseek_engine.kernels import moe_gate, rope
from deepseek_engine.models import decoder, latent_attention, load_model
from deepseek_engine.models.config import DeepseekConfig
from deepseek_engine.models.rope_frequencies import rope_frequencies
from deepseek_engine.models.weights import Checkpoint
from paged_sequences import chunked_logits
from random_checkpoints import random_token_ids
from torch import Tensor

TOLERANCE = 1e-4
TOKENS = random_token_ids(100, seed=1)

Mutation = Callable[[pytest.MonkeyPatch], None]


def read_otherwise(
    patch: pytest.MonkeyPatch, rename: Callable[[str], str], change: Callable[[str, Tensor], Tensor]
) -> None:
    """Read another tensor, or another value, than the one that was asked for."""
    original = Checkpoint.tensor

    def tensor(self: Checkpoint, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return change(name, original(self, rename(name), *shape, dtype=dtype))

    patch.setattr(Checkpoint, "tensor", tensor)


def norms_swapped(patch: pytest.MonkeyPatch) -> None:
    other = {"input_layernorm": "post_attention_layernorm", "post_attention_layernorm": "input_layernorm"}

    def rename(name: str) -> str:
        *start, norm, end = name.split(".") if name.count(".") > 1 else ("", "", name)
        return ".".join((*start, other[norm], end)) if norm in other else name

    read_otherwise(patch, rename, lambda name, tensor: tensor)


def correction_bias_dropped(patch: pytest.MonkeyPatch) -> None:
    read_otherwise(
        patch,
        lambda name: name,
        lambda name, tensor: torch.zeros_like(tensor) if name.endswith("correction_bias") else tensor,
    )


def nope_and_rope_swapped(patch: pytest.MonkeyPatch) -> None:
    def swap(name: str, tensor: Tensor) -> Tensor:
        if not name.endswith("q_b_proj.weight"):
            return tensor
        nope, pe = tensor.view(4, 32, -1).split((16, 16), dim=1)
        return torch.cat((pe, nope), dim=1).reshape(tensor.shape)

    read_otherwise(patch, lambda name: name, swap)


def bias_in_the_weights(patch: pytest.MonkeyPatch) -> None:
    original = moe_gate.noaux_tc

    def gate(logits: Tensor, bias: Tensor, *, scaling: float, **settings: int) -> tuple[Tensor, Tensor]:
        _, experts = original(logits, bias, scaling=scaling, **settings)
        weights = (torch.sigmoid(logits) + bias).gather(-1, experts)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * scaling, experts

    patch.setattr(moe_gate, "noaux_tc", gate)


def groups_masked_with_0(patch: pytest.MonkeyPatch) -> None:
    original = moe_gate.within_best_groups
    patch.setattr(
        moe_gate,
        "within_best_groups",
        lambda *arguments: original(*arguments).nan_to_num(neginf=0.0),
    )


def scale_without_mscale(patch: pytest.MonkeyPatch) -> None:
    def scale(config: DeepseekConfig) -> float:
        return float(config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5

    patch.setattr(latent_attention, "softmax_scale", scale)


def latent_eps_of_the_config(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(latent_attention, "LATENT_NORM_EPS", 1e-5)


def half_split_rope(patch: pytest.MonkeyPatch) -> None:
    def rotate(x: Tensor, rotation: Tensor) -> Tensor:
        first, second = x.clone().chunk(2, dim=-1)
        turned = torch.complex(first, second) * rotation
        return x.copy_(torch.cat((turned.real, turned.imag), dim=-1))

    patch.setattr(rope, "rotate_pairs_", rotate)


def k_pe_unrotated(patch: pytest.MonkeyPatch) -> None:
    original = rope.rotate_pairs_
    patch.setattr(rope, "rotate_pairs_", lambda x, rotation: x if x.shape[1] == 1 else original(x, rotation))


def linear_factor_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        decoder, "rope_frequencies", lambda config, dim: rope_frequencies(dataclasses.replace(config, factor=1.0), dim)
    )


def scaled(times: float) -> Mutation:
    def mutation(patch: pytest.MonkeyPatch) -> None:
        original = moe_gate.noaux_tc

        def gate(logits: Tensor, bias: Tensor, *, scaling: float, **settings: int) -> tuple[Tensor, Tensor]:
            return original(logits, bias, scaling=scaling**times, **settings)

        patch.setattr(moe_gate, "noaux_tc", gate)

    return mutation


MUTATIONS: dict[str, tuple[str, Mutation]] = {
    "norms swapped": ("v3", norms_swapped),
    "correction bias dropped": ("v3", correction_bias_dropped),
    "bias in the weights": ("v3", bias_in_the_weights),
    "softmax scale without mscale squared": ("v3", scale_without_mscale),
    "half-split rope": ("v3", half_split_rope),
    "-inf masked as 0": ("v3", groups_masked_with_0),
    "routed scaling twice": ("v3", scaled(2.0)),
    "routed scaling never": ("v3", scaled(0.0)),
    "latent eps": ("v3", latent_eps_of_the_config),
    "nope and rope swapped": ("v3", nope_and_rope_swapped),
    "k_pe unrotated": ("v3", k_pe_unrotated),
    "linear factor dropped": ("llama_linear", linear_factor_dropped),
}


@pytest.mark.parametrize("chunk", [1, len(TOKENS)])
@pytest.mark.parametrize("name", MUTATIONS)
def test_mistake_moves_logits(
    name: str,
    chunk: int,
    checkpoint_folder: Callable[[str], Path],
    expected_logits: Callable[[str, list[int]], Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    family, mutate = MUTATIONS[name]
    mutate(monkeypatch)
    model = load_model(checkpoint_folder(family), dtype=torch.float32)
    moved = (chunked_logits(model, TOKENS, chunk) - expected_logits(family, TOKENS)).abs().max()
    print(f"{name}: {float(moved):.3f}")
    assert moved > 100 * TOLERANCE
