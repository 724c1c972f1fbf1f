# mypy: disable-error-code="no-untyped-def"
# Device functions have no types that mypy knows.
"""RMSNorm and fused add-RMSNorm on a GPU; the reference is `rms_norm.py`.

    out = weight * cast(x / sqrt(mean(x^2) + eps))               rms_norm
    residual' = residual + x,  out = rms_norm(residual')         add_rms_norm

One program a row and one pass over memory: a row is held in registers. The mean is taken in float32; the cast to the
dtype of x comes before the product with the weight, and residual' is rounded before it is normalised, as in the
reference. Memory-bound: (2 rows D + D) elements read or written, 4 rows D with the addition.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_engine.kernels import launcher
from deepseek_engine.kernels.chaining import follow
from deepseek_engine.kernels.dispatch import require
from deepseek_engine.kernels.variants import Kernel, LaunchPlan, Step, Table, Variant


@triton.jit
def normalise_rows(x, weight, inside, width, eps):
    """weight * cast(x / rms(x)) of one row held as float32; `weight` is of the output's dtype."""
    squares = tl.sum(tl.where(inside, x * x, 0.0), axis=0)
    scaled = x * tl.rsqrt(squares / width + eps)
    rounded = scaled.to(weight.dtype).to(tl.float32)
    return rounded * weight.to(tl.float32)


@triton.jit
def rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, x_stride, out_stride, width, eps, BLOCK: tl.constexpr, CHAINED: tl.constexpr
):
    follow(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    out = normalise_rows(x, weight, inside, width, eps)
    tl.store(out_ptr + row * out_stride + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    x_stride,
    residual_stride,
    out_stride,
    sum_stride,
    width,
    eps,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + row * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    total = (x + residual).to(out_ptr.dtype.element_ty)
    tl.store(sum_ptr + row * sum_stride + columns, total, mask=inside)
    out = normalise_rows(total.to(tl.float32), weight, inside, width, eps)
    tl.store(out_ptr + row * out_stride + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


_MODULE = "deepseek_engine.kernels.rms_norm_triton"
_WIDTHS = ((1024, 4), (2048, 4), (4096, 8), (8192, 8), (16384, 16))
"""Widest row, and the warps that keep it at 8 to 32 elements a thread."""


def _rows(kernel: str) -> tuple[Variant, ...]:
    return tuple(
        Variant(kernel, f"width{block}", {"BLOCK": block}, num_warps=warps, num_stages=1, when={"width": (1, block)})
        for block, warps in _WIDTHS
    )


RMS_NORM = Table(
    Kernel(
        name="rms_norm",
        entry=f"{_MODULE}:rms_norm_kernel",
        signature={
            "x_ptr": "*T",
            "weight_ptr": "*T",
            "out_ptr": "*T",
            "x_stride": "i32",
            "out_stride": "i32",
            "width": "i32",
            "eps": "fp32",
        },
        constants=("BLOCK",),
        divisible=frozenset(("x_ptr", "weight_ptr", "out_ptr", "x_stride", "out_stride", "width")),
        chained=True,
    ),
    _rows("rms_norm"),
)
ADD_RMS_NORM = Table(
    Kernel(
        name="add_rms_norm",
        entry=f"{_MODULE}:add_rms_norm_kernel",
        signature={
            "x_ptr": "*T",
            "residual_ptr": "*T",
            "weight_ptr": "*T",
            "out_ptr": "*T",
            "sum_ptr": "*T",
            "x_stride": "i32",
            "residual_stride": "i32",
            "out_stride": "i32",
            "sum_stride": "i32",
            "width": "i32",
            "eps": "fp32",
        },
        constants=("BLOCK",),
        divisible=frozenset(
            (
                "x_ptr",
                "residual_ptr",
                "weight_ptr",
                "out_ptr",
                "sum_ptr",
                "x_stride",
                "residual_stride",
                "out_stride",
                "sum_stride",
                "width",
            )
        ),
        chained=True,
    ),
    _rows("add_rms_norm"),
)
TABLES = (RMS_NORM, ADD_RMS_NORM)
PLANS = (
    LaunchPlan("rms_norm", (Step("rms_norm", ("rows",)),)),
    LaunchPlan("add_rms_norm", (Step("add_rms_norm", ("rows",)),)),
)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, variant: Variant | None = None) -> Tensor:
    """x [..., D] with rows at one stride, D a multiple of 16; weight [D]. Returns a new tensor of x's shape and dtype.

    `variant` forces a row of RMS_NORM.
    """
    rows = x.view(-1, x.shape[-1]) if x.is_contiguous() else x
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    dims = {"rows": rows.shape[0], "width": rows.shape[1]}
    row = variant or require(RMS_NORM, x, dims)
    launcher.launch(
        RMS_NORM.kernel,
        row,
        PLANS[0].steps[0].blocks(dims, row),
        {
            "x_ptr": rows,
            "weight_ptr": weight,
            "out_ptr": out,
            "x_stride": rows.stride(0),
            "out_stride": out.stride(0),
            "width": rows.shape[1],
            "eps": eps,
        },
    )
    return out.view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, variant: Variant | None = None) -> Tensor:
    """Add x [T, D] to `residual` [T, D] in place and return the norm of the sum, [T, D]."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    dims = {"rows": x.shape[0], "width": x.shape[1]}
    row = variant or require(ADD_RMS_NORM, x, dims)
    launcher.launch(
        ADD_RMS_NORM.kernel,
        row,
        PLANS[1].steps[0].blocks(dims, row),
        {
            "x_ptr": x,
            "residual_ptr": residual,
            "weight_ptr": weight,
            "out_ptr": out,
            "sum_ptr": residual,
            "x_stride": x.stride(0),
            "residual_stride": residual.stride(0),
            "out_stride": out.stride(0),
            "sum_stride": residual.stride(0),
            "width": x.shape[1],
            "eps": eps,
        },
    )
    return out
