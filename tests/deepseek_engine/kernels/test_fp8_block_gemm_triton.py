import pytest
import torch
from device_kernels import DEVICE, DTYPES, INTERPRETING, TOLERANCE, dtype_name, needs_device, random, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")
from deepseek_engine.kernels import fp8_block_gemm_triton as kernels
from deepseek_engine.kernels.fp8_block_gemm import fp8_block_linear

pytestmark = needs_device
BLOCK = (128, 128)


def scaled(columns: int, depth: int, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """A weight's bytes and its blocks' scales, some of them far from the others."""
    weight = random(columns, depth, dtype=torch.float32, scale=100.0, seed=1).to(torch.float8_e4m3fn)
    shape = (-(-columns // block[0]), -(-depth // block[1]))
    scales = torch.exp(random(*shape, dtype=torch.float32, seed=2)) / (100 * depth**0.5)
    return weight.view(torch.uint8), scales.float()


def check(rows: int, columns: int, depth: int, block: tuple[int, int], dtype: torch.dtype, **options: object) -> None:
    x = random(rows, depth, dtype=dtype)
    weight, scales = scaled(columns, depth, block)
    bias = random(columns, dtype=dtype, seed=3) if options.pop("bias", False) else None
    residual = random(rows, columns, dtype=dtype, seed=4) if options.pop("residual", False) else None
    added = {"bias": bias, "residual": residual}
    out = kernels.fp8_block_gemm(x, weight, scales, block=block, **added, **options)  # type: ignore[arg-type]
    wide = {name: None if each is None else each.double() for name, each in added.items()}
    exact = fp8_block_linear(x.double(), weight, scales, block, **wide)
    assert out.shape == (rows, columns)
    assert out.dtype == dtype
    assert relative_error(out, exact) < TOLERANCE[dtype]


@pytest.mark.parametrize("block", [(128, 128), (256, 512)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_one_row(block: tuple[int, int], dtype: torch.dtype) -> None:
    check(1, 133, 1168, block, dtype)


@pytest.mark.parametrize("tiling", kernels.TILINGS, ids=lambda tiling: tiling.name)
def test_every_tiling(tiling: kernels.Tiling) -> None:
    if DEVICE.type == "cuda" and 90 not in tiling.architectures:
        pytest.skip("declared for another architecture")
    check(min(tiling.rows, 32) - 3, 140, 400, BLOCK, DTYPES[1], variant=tiling.variant("fp8_gemm"))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("bias", "residual"), [(True, False), (False, True), (True, True)])
def test_what_is_added(rows: int, bias: bool, residual: bool) -> None:
    check(rows, 40, 160, BLOCK, DTYPES[1], bias=bias, residual=residual)


@pytest.mark.parametrize("at_once", [7, 1000])
def test_many_rows_unpack_the_weight(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepseek_engine.kernels.unpacked_product.UNPACKED_BYTES", at_once * 160 * 2)
    check(65, 40, 160, BLOCK, DTYPES[1], bias=True, residual=True)


def test_rows_of_several_tiles() -> None:
    row = kernels.Tiling("small", 16, 64, 64, 1, 4, 2, (1, 40), constants={"NATIVE": 1}).variant("fp8_gemm")
    check(37, 24, 96, BLOCK, DTYPES[0], variant=row, residual=True)


@settings(deadline=None, max_examples=6)
@given(
    rows=st.integers(1, 20),
    columns=st.integers(1, 40),
    depth=st.integers(1, 100),
    block=st.sampled_from(((7, 13), (128, 128), (1, 40), (128, 96))),
)
def test_any_depth_and_blocks(rows: int, columns: int, depth: int, block: tuple[int, int]) -> None:
    check(rows, columns, depth, block, DTYPES[1], bias=bool(rows % 2), residual=bool(depth % 2))


@pytest.mark.parametrize("native", [1, 0])
@pytest.mark.parametrize("rows", [1, 16])
def test_every_byte_is_decoded(rows: int, native: int) -> None:
    """A product with ones in one place gives the value of each byte, subnormal, largest and NaN among them."""
    weight = torch.arange(256, dtype=torch.uint8, device=DEVICE)[:, None].repeat(1, 16).contiguous()
    scales = torch.ones(2, 1, device=DEVICE)
    x = torch.zeros(rows, 16, dtype=DTYPES[1], device=DEVICE)
    x[:, 3] = 1.0
    if native and DEVICE.type == "cuda" and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("has no instruction for it")
    made = kernels.gemv_variant("one", 8, 64, 2, native, (90,))
    if rows > 1:
        made = kernels.Tiling(
            "some", 16, 64, 64, 1, 4, 2, (1, 16), architectures=(90,), constants={"NATIVE": native}
        ).variant("fp8_gemm")
    out = kernels.fp8_block_gemm(x, weight, scales, block=BLOCK, variant=made)
    values = weight.view(torch.float8_e4m3fn)[:, 3].float()
    # The interpreter's own conversion knows no NaN of this type.
    known = values == values if native and INTERPRETING else torch.ones_like(values, dtype=torch.bool)
    torch.testing.assert_close(out[-1].float()[known], values[known], rtol=0, atol=0, equal_nan=True)
