"""RMS normalisation against float64, alone and in segments."""

import pytest
import torch
from deepseek_engine.kernels.rms_norm import SegmentNorm, rms_norm


def exact(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x, weight = x.double(), weight.double()
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("shape", [(1, 6), (5, 123), (3, 4, 256), (0, 8)])
def test_float64(shape: tuple[int, ...], scale: float) -> None:
    x, weight = torch.randn(shape) * scale, torch.rand(shape[-1]) + 0.5
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), exact(x, weight, 1e-5), rtol=1e-5, atol=1e-6)


def test_zeros_stay_zero() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6), torch.zeros(2, 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounds_before_the_weight(dtype: torch.dtype) -> None:
    x, weight = torch.randn(64, 96).to(dtype), (torch.rand(96) + 0.5).to(dtype)
    normalised = exact(x, torch.ones(96), 1e-6).float().to(dtype)
    found = rms_norm(x, weight, 1e-6)
    assert found.dtype == dtype
    assert (found == weight * normalised).float().mean() > 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_segments_equal_their_norms_and_the_rest_passes(dtype: torch.dtype) -> None:
    x = torch.randn(7, 60).to(dtype)
    x[:, 40:] *= 1e-3
    weights = [(torch.rand(width) + 0.5).to(dtype) for width in (24, 16)]
    found = SegmentNorm.over(60, [(0, weights[0]), (40, weights[1])], 1e-6).forward(x)
    expected = torch.cat(
        (rms_norm(x[:, :24], weights[0], 1e-6), x[:, 24:40], rms_norm(x[:, 40:56], weights[1], 1e-6)), 1
    )
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found[:, :56], expected, rtol=tolerance, atol=1e-6)
    assert torch.equal(found[:, 24:40], x[:, 24:40])
    assert torch.equal(found[:, 56:], x[:, 56:])
