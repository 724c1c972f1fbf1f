"""Weights of four bits: how far they are from what they were, and that the operators read what was packed."""

from pathlib import Path

import pytest
import torch
from deepseek_engine.kernels.int4_gemm import dequantized
from deepseek_ops.exporter.int4 import pack_int4
from deepseek_ops.exporter.weight_format import Int4Format
from hypothesis import example, given
from hypothesis import strategies as st
from one_node import OneNode
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAGNITUDES = (1e-30, 1e-6, 1e-3, 1.0, 1e4)


@st.composite
def weights(draw: st.DrawFn) -> tuple[Tensor, int]:
    """A weight and a group size: groups of one sign, of zeros and with one large element among them."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 150))
    weight = torch.randn(rows, columns, generator=generator) * draw(st.sampled_from(MAGNITUDES))
    shape = draw(st.sampled_from(("normal", "positive", "negative", "sparse", "outliers", "zero")))
    changes = {
        "positive": weight.abs(),
        "negative": -weight.abs(),
        "sparse": weight * (torch.rand(rows, columns, generator=generator) < 0.1),
        "outliers": weight * (1 + 100 * (torch.rand(rows, columns, generator=generator) < 0.02)),
        "zero": weight * 0,
    }
    # Half floats end at 65504.
    weight = changes.get(shape, weight).clamp(-6e4, 6e4).to(draw(st.sampled_from(DTYPES)))
    return weight, draw(st.sampled_from((8, 24, 32, 128)))


@given(weights())
@example((torch.tensor([[3.0e38, -3.0e38]]), 32))
@example((torch.full((1, 3), 6e-8, dtype=torch.float16), 8))
def test_no_element_is_off_by_more_than_half_a_step(case: tuple[Tensor, int]) -> None:
    weight, group_size = case
    rows, columns = weight.shape
    packed = pack_int4(weight, group_size)
    groups = -(-columns // group_size)
    assert packed.q.shape == (rows, -(-columns // 2))
    assert packed.scales.shape == packed.zeros.shape == (rows, groups)
    assert packed.scales.dtype == weight.dtype
    assert int(packed.zeros.max()) <= 15
    steps = packed.scales.double()[:, torch.arange(columns) // group_size]
    off = (dequantized(packed.q, packed.scales, packed.zeros, columns, group_size).double() - weight.double()).abs()
    assert bool((off <= steps * (0.5 + 1e-5)).all())


@given(weights())
def test_zero_stays_zero_and_a_group_has_no_more_steps_than_it_needs(case: tuple[Tensor, int]) -> None:
    weight, group_size = case
    packed = pack_int4(weight, group_size)
    unpacked = dequantized(packed.q, packed.scales, packed.zeros, weight.shape[1], group_size)
    assert bool((unpacked[weight == 0] == 0).all())
    largest = weight.double().abs().amax()
    # 15 steps span what the group spans, and a scale is rounded up by at most 2^-7; half floats end at 2^-24.
    assert float(packed.scales.double().amax()) <= 2 * float(largest) / 15 * (1 + 2**-7) + 2**-24


@given(weights())
def test_packing_does_not_depend_on_the_rows_beside(case: tuple[Tensor, int]) -> None:
    weight, group_size = case
    whole = pack_int4(weight, group_size)
    for row in range(weight.shape[0]):
        alone = pack_int4(weight[row : row + 1], group_size)
        assert torch.equal(alone.q[0], whole.q[row])
        assert torch.equal(alone.scales[0], whole.scales[row])
        assert torch.equal(alone.zeros[0], whole.zeros[row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("columns", "group_size"), [(96, 32), (77, 32), (300, 128), (41, 8), (1030, 24)])
def test_the_operator_reads_what_was_packed(library: Path, dtype: torch.dtype, columns: int, group_size: int) -> None:
    weight = torch.randn(33, columns, generator=torch.Generator().manual_seed(columns)).to(dtype)
    packed = pack_int4(weight, group_size)
    expected = dequantized(packed.q, packed.scales, packed.zeros, columns, group_size)
    for rows in (1, 5, columns):
        # Rows of the identity take the weight's columns out one by one.
        inputs = {"x": torch.eye(columns)[-rows:].contiguous(), "weight": packed.q}
        inputs |= {"scales": packed.scales, "zeros": packed.zeros}
        node = OneNode(library, "DeepSeekMatMulInt4", inputs, {"group_size": group_size}, constant=["weight"])
        torch.testing.assert_close(node.run(inputs)["y"], expected.t()[-rows:], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_is_refused(value: float) -> None:
    weight = torch.zeros(3, 40)
    weight[1, 39] = value
    with pytest.raises(ValueError, match="not finite"):
        pack_int4(weight, 32)


@pytest.mark.parametrize("group_size", [0, 4, 12, -8])
def test_a_group_that_begins_within_a_byte_is_refused(group_size: int) -> None:
    with pytest.raises(ValueError, match=f"group_size is {group_size}; it has to be a multiple of 8"):
        Int4Format(group_size)
