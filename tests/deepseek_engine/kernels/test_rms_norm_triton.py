import pytest
import torch
from device_kernels import DEVICE, DTYPES, TOLERANCE, dtype_name, needs_device, random, relative_error

pytest.importorskip("triton")
from deepseek_engine.kernels import rms_norm as reference
from deepseek_engine.kernels import rms_norm_triton as kernels

pytestmark = needs_device
SHAPES = [(1, 16), (3, 576), (5, 1536), (2, 2048), (7, 5120), (2, 7168)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_rms_norm_equals_its_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = random(*shape, dtype=dtype, scale=3.0), random(shape[1], dtype=dtype)
    out = kernels.rms_norm(x, weight, 1e-6)
    exact = reference.rms_norm(x.double(), weight.double(), 1e-6)
    assert relative_error(out, exact) <= 1.5 * max(
        relative_error(reference.rms_norm(x, weight, 1e-6), exact), TOLERANCE[torch.float32]
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_the_cast_comes_before_the_weight(dtype: torch.dtype) -> None:
    x, weight = random(4, 256, dtype=dtype), random(256, dtype=dtype, seed=1)
    normalised = kernels.rms_norm(x, torch.ones_like(weight), 1e-6)
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-6), weight * normalised, rtol=0, atol=0)


def test_rows_of_a_wider_tensor_are_normalised() -> None:
    wide = random(6, 640, dtype=DTYPES[1])
    part, weight = wide[:, 64:576], random(512, dtype=DTYPES[1])
    torch.testing.assert_close(
        kernels.rms_norm(part, weight, 1e-6), kernels.rms_norm(part.contiguous(), weight, 1e-6), rtol=0, atol=0
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_add_rms_norm_rounds_the_sum_and_norms_it(dtype: torch.dtype) -> None:
    x, residual = (random(5, 2048, dtype=dtype, seed=seed) for seed in range(2))
    weight = random(2048, dtype=dtype, seed=9)
    total = x + residual
    out = kernels.add_rms_norm(x, residual, weight, 1e-6)
    torch.testing.assert_close(residual, total, rtol=0, atol=0)
    torch.testing.assert_close(out, kernels.rms_norm(total, weight, 1e-6), rtol=0, atol=0)


@pytest.mark.parametrize("row", kernels.RMS_NORM.variants, ids=lambda row: row.name)
def test_every_row_gives_the_same(row: kernels.Variant) -> None:
    width = min(row.when["width"][1], 1040)
    x, weight = random(3, width, dtype=DTYPES[1]), random(width, dtype=DTYPES[1], seed=3)
    out = kernels.rms_norm(x, weight, 1e-5, variant=row)
    assert relative_error(out, reference.rms_norm(x.double(), weight.double(), 1e-5)) < TOLERANCE[DTYPES[1]]


@pytest.mark.gpu
def test_padding_is_not_read() -> None:
    buffer = torch.full((4, 2064), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    buffer[:, :2000] = random(4, 2000, dtype=torch.bfloat16)
    weight = random(2000, dtype=torch.bfloat16)
    assert torch.isfinite(kernels.rms_norm(buffer[:, :2000], weight, 1e-6)).all()
