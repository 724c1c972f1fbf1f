# mypy: disable-error-code="no-untyped-def"
# Device functions have no types that mypy knows.
"""A product a head on a GPU: what absorbs W_UK into queries and applies W_UV to mixtures of latents.

    out[t, h] = x[t, h] W[h]          W[h] as [K, N], or stored the other way round as [N, K]

(DeepSeek-V2, arXiv:2405.04434, section 2.1.2; the reference is `mla_attention._absorb` and `_project_values`.) Tokens
and heads stand at any strides, so neither queries nor outputs are re-ordered in memory. Each row's sum is taken in one
order, whatever else is in the batch. Few tokens are bound by reading H N K elements of W, many by arithmetic.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_engine.kernels import launcher
from deepseek_engine.kernels.chaining import follow
from deepseek_engine.kernels.dispatch import require
from deepseek_engine.kernels.variants import Kernel, LaunchPlan, Step, Table, Variant


@triton.jit
def head_gemm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    x_token_stride,
    x_head_stride,
    out_token_stride,
    out_head_stride,
    weight_stride,
    tokens,
    columns,
    depth,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(2).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    real = token < tokens
    wanted = n < columns
    x_rows = x_ptr + token[:, None] * x_token_stride + head * x_head_stride
    base = weight_ptr + head * weight_stride
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in tl.range(0, depth, BLOCK_K):
        column = start + k
        inside = column < depth
        x = tl.load(x_rows + column[None, :], mask=real[:, None] & inside[None, :], other=0.0)
        if BY_COLUMN:
            w = tl.load(base + n[None, :] * depth + column[:, None], mask=wanted[None, :] & inside[:, None], other=0.0)
        else:
            w = tl.load(
                base + column[:, None] * columns + n[None, :], mask=wanted[None, :] & inside[:, None], other=0.0
            )
        acc = tl.dot(x, w, acc, input_precision="ieee")
    target = out_ptr + token[:, None] * out_token_stride + head * out_head_stride + n[None, :]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=real[:, None] & wanted[None, :])


@dataclass(frozen=True, slots=True)
class Tiling:
    """A tile of the product for a range of tokens and of columns."""

    name: str
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    for_tokens: tuple[int, int]
    for_columns: tuple[int, int] = (1, 2**30)

    def variant(self, by_column: int) -> Variant:
        return Variant(
            "head_gemm",
            f"{self.name}_{'columns' if by_column else 'rows'}",
            {"BLOCK_M": self.rows, "BLOCK_N": self.columns, "BLOCK_K": self.depth, "BY_COLUMN": by_column},
            num_warps=self.warps,
            num_stages=self.stages,
            when={"tokens": self.for_tokens, "columns": self.for_columns, "by_column": (by_column, by_column)},
            wide_tiles=self.rows >= 64,
        )


TILINGS = (
    # Few columns are cut finer, so that a few heads still fill the card.
    Tiling("few_narrow", 16, 32, 128, 4, 3, (1, 16), (1, 128)),
    Tiling("few", 16, 64, 128, 4, 2, (1, 16)),
    Tiling("some", 32, 64, 64, 4, 3, (17, 48)),
    Tiling("many", 64, 128, 64, 4, 3, (49, 2**30)),
)
_STRIDES = ("x_token_stride", "x_head_stride", "out_token_stride", "out_head_stride")
HEAD_GEMM = Table(
    Kernel(
        name="head_gemm",
        entry="deepseek_engine.kernels.head_gemm_triton:head_gemm_kernel",
        signature={
            "x_ptr": "*T",
            "weight_ptr": "*T",
            "out_ptr": "*T",
            **dict.fromkeys(_STRIDES, "i32"),
            "weight_stride": "i32",
            "tokens": "i32",
            "columns": "i32",
            "depth": "i32",
        },
        constants=("BLOCK_M", "BLOCK_N", "BLOCK_K", "BY_COLUMN"),
        divisible=frozenset(("x_ptr", "weight_ptr", "out_ptr", *_STRIDES, "weight_stride", "columns", "depth")),
        chained=True,
    ),
    tuple(tiling.variant(by_column) for tiling in TILINGS for by_column in (0, 1)),
)
HEAD_GEMM_FP32 = Table(
    Kernel(
        name="head_gemm_fp32",
        entry=HEAD_GEMM.kernel.entry,
        signature={**HEAD_GEMM.kernel.signature, "out_ptr": "*fp32"},
        constants=HEAD_GEMM.kernel.constants,
        divisible=HEAD_GEMM.kernel.divisible,
        chained=True,
    ),
    (replace(TILINGS[-1].variant(1), kernel="head_gemm_fp32"),),
)
TABLES = (HEAD_GEMM, HEAD_GEMM_FP32)
_GRID = ("ceil_div(columns, BLOCK_N)", "heads", "ceil_div(tokens, BLOCK_M)")
PLANS = (
    LaunchPlan("head_gemm", (Step("head_gemm", _GRID),)),
    LaunchPlan("head_gemm_fp32", (Step("head_gemm_fp32", _GRID),)),
)
FIXED_TOKENS = 2**20
"""As many tokens take the row of the most: what `fixed` asks for, so that a row's sum has one order always."""


def head_gemm(
    x: Tensor,
    weight: Tensor,
    *,
    by_column: bool,
    fixed: bool = False,
    out: Tensor | None = None,
    variant: Variant | None = None,
) -> Tensor:
    """x [T, H, K], any strides that are multiples of 8, by weight; returns [T, H, N], new where `out` is not given.

    weight [H, K, N], or [H, N, K] where `by_column`; contiguous within a head. Dtypes are one, but for an `out` of
    float32. `fixed` uses one tile whatever T is. `variant` forces a row.
    """
    tokens, heads, depth = x.shape
    columns = weight.shape[1] if by_column else weight.shape[2]
    if out is None:
        out = torch.empty(tokens, heads, columns, dtype=x.dtype, device=x.device)
    dims = {"tokens": tokens, "columns": columns, "heads": heads, "by_column": int(by_column)}
    table = HEAD_GEMM if out.dtype == x.dtype else HEAD_GEMM_FP32
    row = variant or require(table, x, {**dims, "tokens": FIXED_TOKENS} if fixed else dims)
    launcher.launch(
        table.kernel,
        row,
        PLANS[0].steps[0].blocks(dims, row),
        {
            "x_ptr": x,
            "weight_ptr": weight,
            "out_ptr": out,
            "x_token_stride": x.stride(0),
            "x_head_stride": x.stride(1),
            "out_token_stride": out.stride(0),
            "out_head_stride": out.stride(1),
            "weight_stride": weight.stride(0),
            "tokens": tokens,
            "columns": columns,
            "depth": depth,
        },
    )
    return out
