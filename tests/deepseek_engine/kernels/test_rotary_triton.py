import pytest
import torch
from device_kernels import DEVICE, DTYPES, TOLERANCE, dtype_name, needs_device, random, relative_error

pytest.importorskip("triton")
from deepseek_engine.kernels import rope
from deepseek_engine.kernels import rotary_triton as kernels
from torch import Tensor

pytestmark = needs_device
SHAPES = [(1, 1, 16, 8), (5, 17, 192, 32), (3, 4, 96, 40), (2, 3, 21, 5), (2, 6, 300, 128)]
"""tokens, heads, a head's width, rotary pairs."""


def frequencies(half: int) -> Tensor:
    return 1.0 / 10000.0 ** (torch.arange(half, device=DEVICE) / half)


@pytest.mark.parametrize("interleaved", [True, False], ids=["pairs", "halves"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_rotary_equals_its_reference(shape: tuple[int, int, int, int], dtype: torch.dtype, interleaved: bool) -> None:
    tokens, heads, width, half = shape
    x, inv_freq = random(tokens, heads, width, dtype=dtype), frequencies(half)
    positions = torch.arange(tokens, device=DEVICE) * 40961 + 3
    out = kernels.rotary(x, positions, inv_freq, scale=0.75, interleaved=interleaved)
    kept, order = width - 2 * half, rope.interleaving(2 * half).to(DEVICE)
    turning = x[..., kept:].double()[..., slice(None) if interleaved else order].contiguous()
    angles = (positions[:, None] * inv_freq).double()
    turned = torch.view_as_real(
        torch.view_as_complex(turning.unflatten(-1, (-1, 2)))
        * torch.polar(torch.full_like(angles, 0.75), angles)[:, None]
    ).flatten(-2)
    expected = turned if interleaved else torch.empty_like(turned).index_copy_(-1, order, turned)
    assert relative_error(out[..., kept:], expected) < TOLERANCE[dtype]
    torch.testing.assert_close(out[..., :kept], x[..., :kept], rtol=0, atol=0)


def test_position_zero_changes_nothing() -> None:
    x = random(2, 3, 64, dtype=DTYPES[1])
    out = kernels.rotary(
        x, torch.zeros(2, dtype=torch.int64, device=DEVICE), frequencies(16), scale=1.0, interleaved=False
    )
    torch.testing.assert_close(out, x, rtol=0, atol=0)


def test_no_rows_are_no_launch() -> None:
    x = random(0, 3, 64, dtype=DTYPES[1])
    positions = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert kernels.rotary(x, positions, frequencies(16), scale=1.0, interleaved=True).shape == x.shape
