"""Rotary embedding against the rotation matrix in float64, and its frequencies against transformers'."""

import math
from typing import Any

import pytest
import torch
from deepseek_engine.kernels import rope
from deepseek_engine.models.config import RopeConfig
from deepseek_engine.models.rope_frequencies import rope_frequencies, rotation_factor, yarn_mscale
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pairs_turn_by_their_angle(dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 1, 5, 4000, 160000])
    inv_freq = rope_frequencies(RopeConfig(), 12)
    x = torch.randn(5, 3, 20).to(dtype)
    before = x.clone()
    found = rope.rotate_pairs_(x.narrow(2, 8, 12), rope.rotations(positions, inv_freq, 1.5))
    angles = (positions.float()[:, None] * inv_freq).double()[:, None]
    first, second = before[..., 8::2].double(), before[..., 9::2].double()
    expected = torch.stack(
        (first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()), dim=-1
    )
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), 1.5 * expected.flatten(-2), rtol=tolerance, atol=tolerance)
    assert found.data_ptr() == x[..., 8:].data_ptr()
    assert torch.equal(x[..., :8], before[..., :8])


def test_interleaving_brings_halves_together() -> None:
    assert rope.interleaving(8).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


@given(shift=st.integers(0, 10_000), distance=st.integers(0, 200))
def test_products_depend_on_the_distance_alone(shift: int, distance: int) -> None:
    inv_freq = rope_frequencies(RopeConfig(), 16)
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 16, generator=generator)

    def product(start: int) -> float:
        turned = [
            rope.rotate_pairs_(x.clone(), rope.rotations(torch.tensor([position]), inv_freq, 1.0))
            for x, position in ((q, start + distance), (k, start))
        ]
        return float((turned[0] * turned[1]).sum())

    assert product(shift) == pytest.approx(product(0), abs=2e-3)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096},
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 2048, "truncate": False},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "attention_factor": 1.25},
    ],
    ids=lambda parameters: f"{parameters['rope_type']}-{len(parameters)}-{parameters['factor']}",
)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_frequencies_are_those_of_transformers(parameters: dict[str, Any], theta: float) -> None:
    config = LlamaConfig(
        head_dim=64, max_position_embeddings=163840, rope_parameters={"rope_theta": theta, **parameters}
    )
    expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")
    ours = RopeConfig(rope_theta=theta, **parameters)
    torch.testing.assert_close(rope_frequencies(ours, 64), expected, rtol=1e-6, atol=0)
    assert rotation_factor(ours) == pytest.approx(factor)


def test_yarn_ramp_of_deepseek() -> None:
    """Dimension 64, base 10000, original context 4096: kept below 10, stretched in full from 23."""
    config = RopeConfig(rope_type="yarn", factor=40.0, original_max_position_embeddings=4096)
    ratio = rope_frequencies(RopeConfig(), 64) / rope_frequencies(config, 64)
    assert (ratio[:11] - 1).abs().max() < 1e-6
    assert (ratio[11:23] > 1.01).all()
    assert (ratio[23:] - 40).abs().max() < 1e-4


def test_mscale() -> None:
    assert yarn_mscale(40.0, 0.707) ** 2 / math.sqrt(192) == pytest.approx(0.1147214, abs=1e-7)
    assert yarn_mscale(40.0, 1.0) ** 2 / math.sqrt(192) == pytest.approx(0.1352338, abs=1e-7)
    assert yarn_mscale(1.0, 1.0) == 1.0
