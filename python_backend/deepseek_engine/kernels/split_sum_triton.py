# mypy: disable-error-code="no-untyped-def"
# Device functions have no types that mypy knows.
"""The sum of a product's parts on a GPU, where K was split over programs: in their order, whichever came last.

    out[m, n] = sum_s parts[s, m, n] + bias[n] + residual[m, n]

Bound by memory, and small: 4 splits M N bytes, mostly from the second-level cache.
"""

import triton
import triton.language as tl
from torch import Tensor

from deepseek_engine.kernels import launcher
from deepseek_engine.kernels.chaining import follow
from deepseek_engine.kernels.dispatch import require
from deepseek_engine.kernels.variants import Kernel, LaunchPlan, Step, Table, Variant


@triton.jit
def store_row(acc, bias_ptr, residual_ptr, out_ptr, n, mask, with_bias, with_residual):
    """The epilogue of one row's columns n."""
    acc += tl.load(bias_ptr + n, mask=mask & (with_bias != 0), other=0.0).to(tl.float32)
    acc += tl.load(residual_ptr + n, mask=mask & (with_residual != 0), other=0.0).to(tl.float32)
    tl.store(out_ptr + n, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def sum_parts_kernel(
    part_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    rows,
    columns,
    splits,
    with_bias,
    with_residual,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    acc = tl.load(bias_ptr + column, mask=inside & (with_bias != 0), other=0.0).to(tl.float32)
    target = row * columns + column
    whole = rows.to(tl.int64) * columns
    acc += tl.load(residual_ptr + target, mask=inside & (with_residual != 0), other=0.0).to(tl.float32)
    for first in tl.range(0, splits, UNROLL):
        for step in tl.static_range(UNROLL):
            split = first + step
            acc += tl.load(part_ptr + split * whole + target, mask=inside & (split < splits), other=0.0)
    tl.store(out_ptr + target, acc.to(out_ptr.dtype.element_ty), mask=inside)


SUM_PARTS = Table(
    Kernel(
        name="sum_parts",
        entry="deepseek_engine.kernels.split_sum_triton:sum_parts_kernel",
        signature={
            "part_ptr": "*fp32",
            "bias_ptr": "*T",
            "residual_ptr": "*T",
            "out_ptr": "*T",
            "rows": "i32",
            "columns": "i32",
            "splits": "i32",
            "with_bias": "i32",
            "with_residual": "i32",
        },
        constants=("BLOCK", "UNROLL"),
        chained=True,
    ),
    (Variant("sum_parts", "block256", {"BLOCK": 256, "UNROLL": 4}, num_warps=4, num_stages=1),),
)
TABLES = (SUM_PARTS,)
PLANS = (LaunchPlan("sum_parts", (Step("sum_parts", ("rows", "ceil_div(columns, BLOCK)")),)),)


def sum_parts(parts: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """Write the sum of parts float32 [S, M, N], bias [N] and residual [M, N] to out [M, N], which is returned."""
    splits, rows, columns = parts.shape
    dims = {"rows": rows, "columns": columns}
    row = require(SUM_PARTS, out, dims)
    launcher.launch(
        SUM_PARTS.kernel,
        row,
        PLANS[0].steps[0].blocks(dims, row),
        {
            "part_ptr": parts,
            "bias_ptr": out if bias is None else bias,
            "residual_ptr": out if residual is None else residual,
            "out_ptr": out,
            "rows": rows,
            "columns": columns,
            "splits": splits,
            "with_bias": int(bias is not None),
            "with_residual": int(residual is not None),
        },
    )
    return out
