import pytest
import torch
from device_kernels import DEVICE, DTYPES, ON_GPU, dtype_name, needs_device, random, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")
from deepseek_engine.kernels import int4_gemm_triton as kernels
from deepseek_engine.kernels.int4_gemm import int4_linear
from deepseek_engine.kernels.variants import Variant

pytestmark = needs_device
on_a_card = pytest.mark.skipif(not ON_GPU, reason="these kernels have no interpreter")
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}
"""A weight is rounded once more than its float32 value, and one row's sums begin at some 2^11 times the input."""


def packed(columns: int, depth: int, group_size: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, ...]:
    """weight, scales and zeros: every byte and every zero of four bits."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-depth // group_size)
    weight = torch.randint(0, 256, (columns, -(-depth // 2)), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(0, 16, (columns, groups), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(columns, groups, generator=generator) + 0.5) / (4 * depth**0.5)
    return weight.to(DEVICE), scales.to(dtype).to(DEVICE), zeros.to(DEVICE)


def check(rows: int, columns: int, depth: int, group_size: int, dtype: torch.dtype, **options: object) -> None:
    x = random(rows, depth, dtype=dtype)
    weight, scales, zeros = packed(columns, depth, group_size, dtype)
    bias = random(columns, dtype=dtype, seed=1) if options.pop("bias", False) else None
    residual = random(rows, columns, dtype=dtype, seed=2) if options.pop("residual", False) else None
    given_zeros = zeros if options.pop("zeros", True) else None
    added = {"bias": bias, "residual": residual}
    out = kernels.int4_gemm(x, weight, scales, given_zeros, group_size=group_size, **added, **options)  # type: ignore[arg-type]
    wide = {name: None if each is None else each.double() for name, each in added.items()}
    exact = int4_linear(x.double(), weight, scales, given_zeros, group_size, **wide)
    assert out.shape == (rows, columns)
    assert out.dtype == dtype
    assert relative_error(out, exact) < TOLERANCE[dtype]


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_one_row(group_size: int, dtype: torch.dtype) -> None:
    check(1, 13, 2304, group_size, dtype)


@pytest.mark.parametrize("row", kernels.INT4_GEMV.variants, ids=lambda row: row.name)
def test_every_row_of_the_vector_products(row: Variant) -> None:
    rows = row.constants["ROWS"]
    check(rows, row.constants["BLOCK_N"] + 1, 2400, 64, DTYPES[1], variant=row, bias=True, residual=True)


@pytest.mark.parametrize("tiling", kernels.TILINGS, ids=lambda tiling: tiling.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_every_tiling(tiling: kernels.Tiling, dtype: torch.dtype) -> None:
    rows, group_size = min(tiling.rows, 32) - 3, 32 if dtype == DTYPES[0] else 128
    check(rows, tiling.columns + 8, 416, group_size, dtype, variant=tiling.variant("int4_gemm"))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("bias", "residual", "zeros"), [(True, False, False), (False, True, True), (True, True, True)])
def test_what_is_added(rows: int, bias: bool, residual: bool, zeros: bool) -> None:
    check(rows, 40, 160, 32, DTYPES[1], bias=bias, residual=residual, zeros=zeros)


@settings(deadline=None, max_examples=6)
@given(
    rows=st.integers(1, 20),
    columns=st.integers(1, 40),
    depth=st.integers(1, 100),
    group_size=st.sampled_from((8, 24, 40, 128)),
)
def test_any_depth_and_group(rows: int, columns: int, depth: int, group_size: int) -> None:
    check(rows, columns, depth, group_size, DTYPES[1], bias=bool(rows % 2), residual=bool(depth % 2))


@pytest.mark.parametrize(("rows", "depth"), [(1, 32), (8, 64), (7, 21)])
def test_each_nibble_stands_where_it_should(rows: int, depth: int) -> None:
    """One column at a time: a product with a row of the identity gives that column of the weight."""
    weight, scales, zeros = packed(24, depth, 32, DTYPES[1])
    identity = torch.eye(depth, dtype=DTYPES[1], device=DEVICE)
    outs = [kernels.int4_gemm(part.contiguous(), weight, scales, zeros, group_size=32) for part in identity.split(rows)]
    exact = int4_linear(identity.double(), weight, scales, zeros, 32)
    torch.testing.assert_close(torch.cat(outs).double(), exact, rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize("at_once", [7, 1000])
def test_many_rows_unpack_the_weight(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepseek_engine.kernels.unpacked_product.UNPACKED_BYTES", at_once * 160 * 2)
    check(65, 40, 160, 32, DTYPES[1], bias=True, residual=True)


def test_rows_of_several_tiles() -> None:
    row = kernels.Tiling("small", 16, 64, 64, 1, 4, 2, (1, 40)).variant("int4_gemm")
    check(37, 24, 96, 32, DTYPES[1], variant=row, residual=True)


def test_a_row_does_not_depend_on_the_others() -> None:
    x = random(9, 256, dtype=DTYPES[1])
    weight, scales, zeros = packed(40, 256, 32, DTYPES[1])
    row = kernels.TILINGS[0].variant("int4_gemm")
    together = kernels.int4_gemm(x, weight, scales, zeros, group_size=32, variant=row)
    alone = kernels.int4_gemm(x[3:4].clone(), weight, scales, zeros, group_size=32, variant=row)
    torch.testing.assert_close(together[3:4], alone, rtol=0, atol=0)


@pytest.mark.gpu
@on_a_card
@pytest.mark.parametrize("row", kernels.INT4_ROWS.variants, ids=lambda row: row.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_every_row_of_the_products_in_registers(row: Variant, dtype: torch.dtype, group_size: int) -> None:
    """Fewer and more rows than a tile has, columns past the last tile's, one block of K and odd numbers of them."""
    for rows, depth in ((1, 32), (row.constants["BLOCK_M"] - 1, 4000), (row.constants["BLOCK_M"] + 3, 2304)):
        columns = 2 * row.constants["BLOCK_N"] + 3
        check(rows, columns, depth, group_size, dtype, variant=row, bias=True, residual=depth > 32, zeros=rows > 1)


@pytest.mark.gpu
@on_a_card
@pytest.mark.parametrize("columns", [40, 3100, 6200, 16400])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9, 16, 17, 32, 33])
def test_the_row_that_is_chosen(rows: int, columns: int) -> None:
    check(rows, columns, 256, 32, torch.bfloat16, bias=True)
    check(rows, columns, 4096 + 32, 64, torch.bfloat16, residual=True)


@pytest.mark.gpu
@on_a_card
def test_a_row_in_registers_does_not_depend_on_the_others() -> None:
    x = random(8, 512, dtype=torch.bfloat16)
    weight, scales, zeros = packed(4000, 512, 32, torch.bfloat16)
    together = kernels.int4_gemm(x, weight, scales, zeros, group_size=32)
    for row in range(8):
        alone = kernels.int4_gemm(x[row : row + 1].clone(), weight, scales, zeros, group_size=32)
        torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=0)
