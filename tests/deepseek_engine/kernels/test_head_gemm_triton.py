import pytest
import torch
from device_kernels import DEVICE, DTYPES, TOLERANCE, dtype_name, needs_device, random, relative_error
from torch import Tensor

pytest.importorskip("triton")
from deepseek_engine.kernels import head_gemm_triton as kernels

pytestmark = needs_device
SHAPES = [(1, 3, 16, 32), (2, 4, 24, 40), (5, 1, 136, 72), (17, 2, 64, 136), (50, 1, 72, 24)]
"""Tokens, heads, K, N: each kind of tile, with ragged edges."""


def exact(x: Tensor, weight: Tensor, by_column: bool) -> Tensor:
    return torch.einsum("thk,hnk->thn" if by_column else "thk,hkn->thn", x.double(), weight.double())


def weight_of(heads: int, depth: int, columns: int, dtype: torch.dtype, by_column: bool) -> Tensor:
    shape = (heads, columns, depth) if by_column else (heads, depth, columns)
    return random(*shape, dtype=dtype, seed=1)


@pytest.mark.parametrize("by_column", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_a_heads_product_equals_its_reference(
    shape: tuple[int, int, int, int], dtype: torch.dtype, by_column: bool
) -> None:
    tokens, heads, depth, columns = shape
    x, weight = random(tokens, heads, depth, dtype=dtype), weight_of(heads, depth, columns, dtype, by_column)
    out = kernels.head_gemm(x, weight, by_column=by_column)
    assert out.shape == (tokens, heads, columns)
    assert relative_error(out, exact(x, weight, by_column)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("row", kernels.HEAD_GEMM.variants, ids=lambda row: row.name)
def test_every_row_agrees(row: kernels.Variant) -> None:
    by_column = bool(row.constants["BY_COLUMN"])
    x, weight = random(3, 2, 40, dtype=DTYPES[1]), weight_of(2, 40, 72, DTYPES[1], by_column)
    out = kernels.head_gemm(x, weight, by_column=by_column, variant=row)
    assert relative_error(out, exact(x, weight, by_column)) <= TOLERANCE[DTYPES[1]]


def test_queries_are_taken_from_where_they_stand() -> None:
    """As attention has them: part of each head's queries, by the part of kv_b that absorbs them."""
    q, kv_b = random(4, 3, 40, dtype=DTYPES[1]), random(3, 56, 32, dtype=DTYPES[1], seed=2)
    x, weight = q.narrow(2, 8, 24), kv_b.narrow(1, 0, 24)
    out = kernels.head_gemm(x, weight, by_column=False)
    assert torch.equal(out, kernels.head_gemm(x.contiguous(), weight.contiguous(), by_column=False))
    values = kv_b.narrow(1, 24, 32)
    mixed = random(4, 3, 32, dtype=DTYPES[1], seed=3)
    out = kernels.head_gemm(mixed, values, by_column=True)
    assert torch.equal(out, kernels.head_gemm(mixed, values.contiguous(), by_column=True))


def test_a_token_does_not_depend_on_the_others() -> None:
    """Among the counts that one row of the table serves."""
    x, weight = random(16, 2, 64, dtype=DTYPES[1]), weight_of(2, 64, 48, DTYPES[1], False)
    together = kernels.head_gemm(x, weight, by_column=False)
    for token in (0, 15):
        alone = kernels.head_gemm(x[token : token + 1], weight, by_column=False)
        assert torch.equal(together[token : token + 1], alone)


def test_a_token_that_is_not_a_number_spoils_its_own_row_alone() -> None:
    x, weight = random(3, 2, 24, dtype=DTYPES[1]), weight_of(2, 24, 40, DTYPES[1], True)
    x[1] = float("nan")
    out = kernels.head_gemm(x, weight, by_column=True)
    assert out[1].isnan().all()
    assert torch.isfinite(out[::2]).all()


@pytest.mark.gpu
def test_what_stands_around_queries_and_weights_is_not_read() -> None:
    q = torch.full((9, 4, 200), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    kv_b = torch.full((4, 260, 512), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    q[:, :, :120] = random(9, 4, 120, dtype=torch.bfloat16)
    kv_b[:, :120] = random(4, 120, 512, dtype=torch.bfloat16, seed=1)
    out = kernels.head_gemm(q[:, :, :120], kv_b[:, :120], by_column=False)
    assert relative_error(out, exact(q[:, :, :120], kv_b[:, :120], False)) <= TOLERANCE[torch.bfloat16]
