"""Packed weights: which matrices are taken, and their product against float64."""

import pytest
import torch
from deepseek_engine.kernels import half_weight
from deepseek_engine.kernels.half_weight import HalfWeight
from deepseek_engine.kernels.linear import add_linear, linear

pytestmark = pytest.mark.skipif(
    HalfWeight.of(torch.ones(8, 8)) is None, reason="this torch or processor has no float16 product for float32 rows"
)


def trained(rows: int, columns: int, scale: float = 0.02) -> torch.Tensor:
    """Weights as a bfloat16 checkpoint holds them."""
    return (torch.randn(rows, columns) * scale).bfloat16().float()


@pytest.mark.parametrize("tokens", [0, 1, 7, 65])
@pytest.mark.parametrize(("width", "out"), [(1, 1), (30, 17), (256, 1632)])
def test_products_are_those_of_the_weight(tokens: int, width: int, out: int) -> None:
    weight = trained(width, out, scale=1.0)
    packed = HalfWeight.of(weight)
    assert packed is not None
    x, bias, residual = torch.randn(tokens, 2 * width)[:, :width], torch.randn(out), torch.randn(tokens, out)
    exact = x.double() @ weight.double()
    torch.testing.assert_close(linear(x, packed).double(), exact, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(linear(x, packed, bias).double(), exact + bias, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(add_linear(residual, x, packed).double(), exact + residual, rtol=1e-5, atol=1e-4)


def test_a_row_depends_on_no_other() -> None:
    packed = HalfWeight.of(trained(64, 48))
    assert packed is not None
    x = torch.randn(5, 64)
    broken = x.clone()
    broken[2] = float("nan")
    rows = [0, 1, 3, 4]
    torch.testing.assert_close(linear(broken, packed)[rows], linear(x, packed)[rows])
    assert linear(broken, packed)[2].isnan().all()


@pytest.mark.parametrize(
    "weight",
    [
        torch.full((8, 8), 1.0 + 2.0**-12),
        torch.full((8, 8), 70000.0),
        torch.full((8, 8), float("nan")),
        torch.full((8, 8), 2.0**-20 + 2.0**-26),
        torch.ones(8, 8, dtype=torch.bfloat16),
    ],
    ids=["more bits than float16 has", "beyond its range", "not a number", "below its range", "another type"],
)
def test_weights_that_float16_does_not_hold_stay(weight: torch.Tensor) -> None:
    assert HalfWeight.of(weight) is None


def test_one_output_of_tiny_weights_is_enough_to_stay() -> None:
    weight = trained(256, 256)
    weight[:, 3] *= 2.0**-13
    assert HalfWeight.of(weight) is None


def test_tiny_weights_among_others_are_rounded() -> None:
    weight = trained(256, 256)
    weight[0, 0] = 2.0**-20 + 2.0**-26
    assert HalfWeight.of(weight) is not None


def test_large_weights_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_weight, "PACKED_ELEMENTS", 63)
    assert HalfWeight.of(torch.ones(8, 8)) is None
