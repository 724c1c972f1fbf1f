# mypy: disable-error-code="no-untyped-def"
# Device functions have no types that mypy knows.
"""silu(gate) * up on a GPU, in one pass over memory; the reference is `swiglu.py`.

Computed in float32 (Shazeer, arXiv:2002.05202). Memory-bound: 3 I elements a row.
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
def swiglu_kernel(x_ptr, out_ptr, width, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    follow(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x_ptr + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + column, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=inside)


SWIGLU = Table(
    Kernel(
        name="swiglu",
        entry="deepseek_engine.kernels.swiglu_triton:swiglu_kernel",
        signature={"x_ptr": "*T", "out_ptr": "*T", "width": "i32"},
        constants=("BLOCK",),
        divisible=frozenset(("x_ptr", "out_ptr", "width")),
        chained=True,
    ),
    (Variant("swiglu", "block1024", {"BLOCK": 1024}, num_warps=4, num_stages=1),),
)
TABLES = (SWIGLU,)
PLANS = (LaunchPlan("swiglu", (Step("swiglu", ("rows", "ceil_div(width, BLOCK)")),)),)


def swiglu(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 * I] = [gate | up], contiguous; returns a new [T, I]."""
    dims = {"rows": gate_up.shape[0], "width": gate_up.shape[1] // 2}
    out = torch.empty(dims["rows"], dims["width"], dtype=gate_up.dtype, device=gate_up.device)
    row = require(SWIGLU, gate_up, dims)
    launcher.launch(
        SWIGLU.kernel,
        row,
        PLANS[0].steps[0].blocks(dims, row),
        {"x_ptr": gate_up, "out_ptr": out, "width": dims["width"]},
    )
    return out
