import pytest
import torch
from device_kernels import DEVICE, DTYPES, TOLERANCE, dtype_name, needs_device, random, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")
from deepseek_engine.kernels import block_sparse_gemm_triton as kernels
from deepseek_engine.kernels.block_sparse_gemm import block_sparse_gemm as reference
from deepseek_engine.kernels.dispatch import NoVariantError
from deepseek_engine.kernels.tiled_mask import tiled_mask

pytestmark = needs_device


def blocks(rows: int, depth: int, density: float, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(-(-rows // 8), depth // 8, generator=generator) < density).to(DEVICE)


def check(
    mask: Tensor,
    rows: int,
    columns: int,
    depth: int,
    *,
    dtype: torch.dtype = DTYPES[0],
    tile: tuple[int, int] = (128, 64),
    cluster: bool = True,
    row: kernels.Variant | None = None,
) -> None:
    """What A holds in absent blocks is NaN."""
    a, b = random(rows, depth, dtype=dtype, seed=1), random(depth, columns, dtype=dtype, seed=2)
    present = mask.repeat_interleave(8, 0)[:rows].repeat_interleave(8, 1)
    a = a.masked_fill(~present, float("nan"))
    tiled = tiled_mask(mask, rows=rows, depth=depth, tile_rows=tile[0], tile_depth=tile[1], cluster=cluster)
    out = kernels.block_sparse_gemm(a, b, tiled, row=row)
    assert relative_error(out, reference(a.double(), b.double(), mask)) < TOLERANCE[dtype]
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("shape", [(300, 136, 200), (5, 8, 8), (128, 256, 640), (136, 520, 72)], ids=str)
def test_shapes(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, columns, depth = shape
    check(blocks(rows, depth, 0.3), rows, columns, depth, dtype=dtype)


@pytest.mark.parametrize("density", [0.0, 0.02, 1.0])
@pytest.mark.parametrize("cluster", [True, False], ids=["clustered", "in_order"])
def test_densities(density: float, cluster: bool) -> None:
    check(blocks(260, 328, density), 260, 64, 328, cluster=cluster)


def test_full_and_partial_tiles_of_one_row() -> None:
    mask = blocks(256, 384, 0.4)
    mask[:, 8:24] = True
    mask[:16, 32:40] = False
    check(mask, 256, 264, 384, dtype=DTYPES[1])


@pytest.mark.parametrize("row", kernels.BLOCK_SPARSE_GEMM.variants, ids=lambda row: row.name)
def test_every_row(row: kernels.Variant) -> None:
    if DEVICE.type == "cuda" and 90 not in row.architectures:
        pytest.skip("declared for another architecture")
    tile = (row.constants["BLOCK_M"], row.constants["BLOCK_K"])
    check(blocks(200, 264, 0.3), 200, 304, 264, tile=tile, dtype=DTYPES[1], row=row)


@settings(max_examples=12)
@given(
    rows=st.integers(1, 280),
    columns=st.integers(1, 40),
    depth=st.integers(1, 40),
    density=st.floats(0.0, 1.0),
    seed=st.integers(0, 99),
)
def test_random_masks(rows: int, columns: int, depth: int, density: float, seed: int) -> None:
    check(blocks(rows, depth * 8, density, seed), rows, columns * 8, depth * 8, tile=(64, 64))


def test_rows_at_a_stride() -> None:
    mask = blocks(130, 128, 0.5)
    a = random(130, 256, dtype=DTYPES[1])[:, 64:192]
    b = random(128, 96, dtype=DTYPES[1])[:, 16:80]
    out = kernels.block_sparse_gemm(a, b, tiled_mask(mask, rows=130, depth=128))
    assert relative_error(out, reference(a.double(), b.double(), mask)) < TOLERANCE[DTYPES[1]]


def test_what_does_not_fit_is_refused() -> None:
    a, b = random(16, 32, dtype=DTYPES[1]), random(32, 24, dtype=DTYPES[1])
    mask = blocks(16, 32, 1.0)
    tiled = tiled_mask(mask, rows=16, depth=32)
    with pytest.raises(ValueError, match="do not fit"):
        kernels.block_sparse_gemm(a[:8], b, tiled)
    with pytest.raises(ValueError, match="20 columns"):
        kernels.block_sparse_gemm(a, b[:, :20], tiled)
    with pytest.raises(NoVariantError, match="tile_depth 32"):
        kernels.block_sparse_gemm(a, b, tiled_mask(mask, rows=16, depth=32, tile_depth=32))


@pytest.mark.gpu
def test_a_large_product() -> None:
    check(blocks(4096, 2048, 0.1), 4096, 1024, 2048, dtype=torch.bfloat16)
