import pytest
import torch
from device_kernels import DEVICE, DTYPES, TOLERANCE, dtype_name, needs_device, random, relative_error

pytest.importorskip("triton")
from deepseek_engine.kernels import swiglu as reference
from deepseek_engine.kernels import swiglu_triton as kernels

pytestmark = needs_device
SHAPES = [(1, 8), (3, 104), (2, 1024), (5, 1032), (2, 2816)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_swiglu_equals_its_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows, width = shape
    x = random(rows, 2 * width, dtype=dtype, scale=3.0)
    exact = reference.swiglu(x.double())
    bound = max(relative_error(reference.swiglu(x), exact), TOLERANCE[torch.float32])
    out = kernels.swiglu(x)
    assert out.shape == (rows, width)
    assert out.dtype == dtype
    assert relative_error(out, exact) <= 1.5 * bound


def test_a_rows_gate_and_up_are_its_halves() -> None:
    x = torch.zeros(2, 32, dtype=DTYPES[1], device=DEVICE)
    x[0, 3], x[0, 16 + 3] = 2.0, 5.0
    x[1, 4], x[1, 4 + 1] = 2.0, 5.0
    out = kernels.swiglu(x)
    assert out[0, 3].item() == pytest.approx(2.0 / (1.0 + 2.718281828**-2.0) * 5.0, rel=1e-3)
    assert int((out != 0).sum()) == 1


def test_large_gates_neither_overflow_nor_turn_into_nan() -> None:
    x = torch.full((1, 16), -60000.0, dtype=torch.float16, device=DEVICE)
    x[0, 8:] = 1.0
    x[0, 1] = 60000.0
    assert kernels.swiglu(x)[0].tolist() == [0.0, 60000.0, *[0.0] * 6]


def test_no_rows_are_no_launch() -> None:
    assert kernels.swiglu(random(0, 32, dtype=DTYPES[1])).shape == (0, 16)


@pytest.mark.gpu
def test_padding_is_not_read() -> None:
    buffer = torch.full((4, 2 * 104), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    buffer[:2] = random(2, 2 * 104, dtype=torch.bfloat16)
    assert torch.isfinite(kernels.swiglu(buffer[:2])).all()
