import pytest
import torch
import torch.nn.functional as F
from device_kernels import DEVICE, DTYPES, dtype_name, needs_device, random, relative_error
from torch import Tensor

pytest.importorskip("triton")
from deepseek_engine.kernels import small_gemm_triton as kernels
from deepseek_engine.kernels.dispatch import NoVariantError

pytestmark = needs_device
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}
FUSIONS = [(True, "plain"), (True, "silu"), (False, "plain"), (False, "residual")]
"""Those that rows are declared for."""


def check(rows: int, columns: int, depth: int, norm: bool, epilogue: str, dtype: torch.dtype, **forced: object) -> None:
    x = random(rows, depth, dtype=dtype, scale=2.0)
    weight = random(columns * (2 if epilogue == "silu" else 1), depth, dtype=dtype, scale=depth**-0.5, seed=1)
    gain = random(depth, dtype=dtype, seed=2) if norm else None
    residual = random(rows, columns, dtype=dtype, seed=3) if epilogue == "residual" else None
    workspace = kernels.Workspace.reserve(columns, DEVICE)
    options = {"norm": gain, "eps": 1e-5, "residual": residual, "silu": epilogue == "silu", **forced}
    outs = [kernels.small_gemm(x, weight, workspace, **options) for _ in range(2)]
    exact = exact_product(x, weight, gain, residual, silu=epilogue == "silu")
    assert relative_error(outs[0], exact) < TOLERANCE[dtype]
    # A second launch over the same scratch gives the same bits, whichever part came last.
    torch.testing.assert_close(outs[0], outs[1], rtol=0, atol=0)
    assert (workspace.counters == 0).all()


def exact_product(x: Tensor, weight: Tensor, gain: Tensor | None, residual: Tensor | None, *, silu: bool) -> Tensor:
    x, weight = x.double(), weight.double()
    if gain is not None:
        x = F.rms_norm(x, gain.shape, gain.double(), 1e-5)
    y = x @ weight.t()
    if silu:
        gate, up = y.chunk(2, dim=-1)
        return F.silu(gate) * up
    return y if residual is None else y + residual.double()


@pytest.mark.parametrize(("norm", "epilogue"), FUSIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_one_row(norm: bool, epilogue: str, dtype: torch.dtype) -> None:
    check(1, 37, 2064, norm, epilogue, dtype)


@pytest.mark.parametrize(("norm", "epilogue"), FUSIONS)
@pytest.mark.parametrize("rows", [2, 16, 33])
def test_some_rows(rows: int, norm: bool, epilogue: str) -> None:
    check(rows, 100, 784, norm, epilogue, DTYPES[1])


@pytest.mark.parametrize("tiling", kernels.TILINGS, ids=lambda tiling: tiling.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_every_tiling(tiling: kernels.Tiling, dtype: torch.dtype) -> None:
    if DEVICE.type == "cuda" and 90 not in tiling.architectures:
        pytest.skip("declared for another architecture")
    check(tiling.rows - 3, 72, 656, True, "silu", dtype, variant=tiling.variant("rows_gemm", 1, "silu"))


@pytest.mark.parametrize("rows", [1, 5])
def test_float32_logits_are_not_rounded(rows: int) -> None:
    x, weight = random(rows, 256, dtype=DTYPES[1]), random(40, 256, dtype=DTYPES[1], scale=0.06, seed=1)
    workspace = kernels.Workspace.reserve(40, DEVICE)
    out = kernels.small_gemm(x, weight, workspace, out_dtype=torch.float32)
    assert out.dtype == torch.float32
    # Tensor cores add with fewer bits than float32 has; a result rounded to half precision would be 2e-4 off.
    assert relative_error(out, x.double() @ weight.double().t()) < 2e-5


def test_a_residual_slice_with_its_own_stride() -> None:
    x, weight = random(3, 64, dtype=DTYPES[1]), random(48, 64, dtype=DTYPES[1], seed=1)
    wide = random(3, 96, dtype=DTYPES[1], seed=2)
    workspace = kernels.Workspace.reserve(48, DEVICE)
    out = kernels.small_gemm(x, weight, workspace, residual=wide[:, :48])
    assert relative_error(out, x.double() @ weight.double().t() + wide[:, :48].double()) < TOLERANCE[DTYPES[1]]


def test_an_undeclared_fusion_is_told() -> None:
    x = random(2, 64, dtype=DTYPES[1])
    with pytest.raises(NoVariantError, match="no row fits"):
        kernels.small_gemm(x, x, kernels.Workspace.reserve(2, DEVICE), norm=x[0], residual=x[:, :2])


def test_too_many_rows_are_refused() -> None:
    x = random(65, 64, dtype=DTYPES[1])
    with pytest.raises(ValueError, match="1 to 64 rows"):
        kernels.small_gemm(x, x, kernels.Workspace.reserve(65, DEVICE))
