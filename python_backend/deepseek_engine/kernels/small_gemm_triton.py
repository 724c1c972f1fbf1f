# mypy: disable-error-code="no-untyped-def"
# Device functions have no types that mypy knows.
"""Products of 1 to 64 rows with a weight matrix on a GPU, with what stands before and after them fused.

    y = norm(x) W^T,    norm(x) = x * g / sqrt(mean(x^2) + eps), or x itself
    out = y,  residual + y,  or  silu(y[:, : N]) * y[:, N :] for a W of 2 N rows [gate; up]

The plain form is torch.nn.functional.linear between `rms_norm.rms_norm` and an addition or `swiglu.swiglu`. Here
x * g enters the product and 1 / sqrt(...) is applied to its sum, so that one pass over x serves both; the reference's
rounding in between falls away, the result is at least as near to the exact one.

One row is a matrix-vector product: each program loads its rows of W at once, and the sum stays in registers. More rows
run on the tensor cores, W as the wide side. Where the tiles are too few for the card, K is split: each program
leaves its part in scratch and the last to arrive adds the parts in their order, so the sum does not depend on timing.

Bound by memory: W is read once.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_engine.kernels import launcher
from deepseek_engine.kernels.chaining import follow
from deepseek_engine.kernels.dispatch import require
from deepseek_engine.kernels.variants import (
    ADA,
    AMPERE,
    ARCHITECTURES,
    HOPPER,
    Kernel,
    LaunchPlan,
    Step,
    Table,
    Variant,
    ceil_div,
)

PLAIN, RESIDUAL, SILU = 0, 1, 2
EPILOGUES = {"plain": PLAIN, "residual": RESIDUAL, "silu": SILU}
MAX_ROWS = 64


@triton.jit
def row_gemv_kernel(
    x_ptr,
    weight_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    columns,
    depth,
    eps,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    EPILOGUE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    wanted = n < columns
    rows = weight_ptr + n.to(tl.int64)[:, None] * depth
    step_up = columns.to(tl.int64) * depth
    acc = tl.zeros((BLOCK_N,), dtype=tl.float32)
    up = tl.zeros((BLOCK_N,), dtype=tl.float32)
    squares = tl.zeros((BLOCK_K,), dtype=tl.float32)
    # A block of the weight is asked for ahead of its product, the first while the kernel before still runs.
    mask = wanted[:, None] & (k < depth)[None, :]
    w = tl.load(rows + k[None, :], mask=mask, other=0.0)
    if EPILOGUE == 2:
        w_up = tl.load(rows + step_up + k[None, :], mask=mask, other=0.0)
    follow(CHAINED)
    for start in tl.range(0, depth, BLOCK_K):
        column = start + k
        inside = column < depth
        x = tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x = x * tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
        acc += tl.sum(w.to(tl.float32) * x[None, :], axis=1)
        if EPILOGUE == 2:
            up += tl.sum(w_up.to(tl.float32) * x[None, :], axis=1)
        ahead = column + BLOCK_K
        mask = wanted[:, None] & (ahead < depth)[None, :]
        w = tl.load(rows + ahead[None, :], mask=mask, other=0.0)
        if EPILOGUE == 2:
            w_up = tl.load(rows + step_up + ahead[None, :], mask=mask, other=0.0)
    if NORM:
        rstd = tl.rsqrt(tl.sum(squares, axis=0) / depth + eps)
        acc = acc * rstd
        up = up * rstd
    if EPILOGUE == 1:
        acc += tl.load(residual_ptr + n, mask=wanted, other=0.0).to(tl.float32)
    if EPILOGUE == 2:
        acc = acc * tl.sigmoid(acc) * up
    tl.store(out_ptr + n, acc.to(out_ptr.dtype.element_ty), mask=wanted)


@triton.jit
def finish(
    acc,
    up,
    squares,
    residual_ptr,
    out_ptr,
    target,
    residual_target,
    mask,
    depth,
    eps,
    NORM: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """The epilogue of a tile [BLOCK_N, BLOCK_M]."""
    if NORM:
        rstd = tl.rsqrt(squares / depth + eps)[None, :]
        acc = acc * rstd
        up = up * rstd
    if EPILOGUE == 1:
        acc += tl.load(residual_ptr + residual_target, mask=mask, other=0.0).to(tl.float32)
    if EPILOGUE == 2:
        acc = acc * tl.sigmoid(acc) * up
    tl.store(out_ptr + target, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def rows_gemm_kernel(
    x_ptr,
    weight_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    part_ptr,
    counter_ptr,
    x_stride,
    residual_stride,
    rows,
    columns,
    depth,
    eps,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    NORM: tl.constexpr,
    EPILOGUE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    wanted = n < columns
    real = m < rows
    x_rows = x_ptr + m.to(tl.int64)[None, :] * x_stride
    # Columns past the last read a real one, and are dropped when the tile is stored.
    w_rows = weight_ptr + tl.where(wanted, n, 0).to(tl.int64)[:, None] * depth
    up_rows = w_rows + columns.to(tl.int64) * depth
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    squares = tl.zeros((BLOCK_M,), dtype=tl.float32)
    steps = tl.cdiv(tl.cdiv(depth, BLOCK_K), SPLITS)
    first = split * steps
    for step in tl.range(first, tl.minimum(first + steps, tl.cdiv(depth, BLOCK_K))):
        column = step * BLOCK_K + k
        inside = column < depth
        x = tl.load(x_rows + column[:, None], mask=inside[:, None] & real[None, :], other=0.0)
        w = tl.load(w_rows + column[None, :], mask=inside[None, :], other=0.0)
        if NORM:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, axis=0)
            gain = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
            x = (wide * gain[:, None]).to(x_ptr.dtype.element_ty)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if EPILOGUE == 2:
            w_up = tl.load(up_rows + column[None, :], mask=inside[None, :], other=0.0)
            up = tl.dot(w_up, x, up, input_precision="ieee")
    mask = wanted[:, None] & real[None, :]
    target = m.to(tl.int64)[None, :] * columns + n[:, None]
    residual_target = m.to(tl.int64)[None, :] * residual_stride + n[:, None]
    if SPLITS == 1:
        finish(acc, up, squares, residual_ptr, out_ptr, target, residual_target, mask, depth, eps, NORM, EPILOGUE)
    else:
        # A part: BLOCK_N rows of sums, as many of the second product, and one of the squares.
        PART: tl.constexpr = (2 * BLOCK_N + 1) * BLOCK_M
        inner = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        base = part_ptr + (tile.to(tl.int64) * SPLITS + split) * PART
        tl.store(base + inner, acc)
        if EPILOGUE == 2:
            tl.store(base + BLOCK_N * BLOCK_M + inner, up)
        if NORM:
            tl.store(base + 2 * BLOCK_N * BLOCK_M + m, squares)
        # Every thread's part must be written before the count says so.
        tl.debug_barrier()
        arrived = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel")
        if arrived == SPLITS - 1:
            acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            squares = tl.zeros((BLOCK_M,), dtype=tl.float32)
            for other in tl.static_range(SPLITS):
                other_base = part_ptr + (tile.to(tl.int64) * SPLITS + other) * PART
                acc += tl.load(other_base + inner, cache_modifier=".cg")
                if EPILOGUE == 2:
                    up += tl.load(other_base + BLOCK_N * BLOCK_M + inner, cache_modifier=".cg")
                if NORM:
                    squares += tl.load(other_base + 2 * BLOCK_N * BLOCK_M + m, cache_modifier=".cg")
            finish(acc, up, squares, residual_ptr, out_ptr, target, residual_target, mask, depth, eps, NORM, EPILOGUE)
            # Ready for the next launch, which a captured graph repeats without clearing anything.
            tl.store(counter_ptr + tile, 0)


_MODULE = "deepseek_engine.kernels.small_gemm_triton"
_COMBINATIONS = ((1, "plain"), (1, "silu"), (0, "plain"), (0, "silu"), (0, "residual"))
"""q with kv_a; gate with up; anything; gate with up of normalised rows; o_proj and down."""
_LOGITS = ((1, "plain"), (0, "plain"))


def _fused(norm: int, epilogue: str) -> dict[str, int]:
    return {"NORM": norm, "EPILOGUE": EPILOGUES[epilogue]}


def _when(norm: int, epilogue: str) -> dict[str, tuple[int, int]]:
    return {"norm": (norm, norm), "epilogue": (EPILOGUES[epilogue], EPILOGUES[epilogue])}


def gemv_variant(
    kernel: str,
    norm: int,
    epilogue: str,
    columns: int,
    depth: int,
    warps: int,
    name: str,
    reach: tuple[int, int] = (1, 2**30),
) -> Variant:
    return Variant(
        kernel,
        f"{name}_{'norm' if norm else 'raw'}_{epilogue}",
        {"BLOCK_N": columns, "BLOCK_K": depth, **_fused(norm, epilogue)},
        num_warps=warps,
        num_stages=1,
        when={"rows": (1, 1), "columns": reach, **_when(norm, epilogue)},
    )


@dataclass(frozen=True, slots=True)
class Tiling:
    """A tile of the product, for ranges of rows, of tiles of 64 columns, and of the depth K."""

    name: str
    rows: int
    columns: int
    depth: int
    splits: int
    warps: int
    stages: int
    tiles: tuple[int, int]
    for_rows: tuple[int, int]
    architectures: tuple[int, ...] = ARCHITECTURES
    for_depth: tuple[int, int] = (1, 2**30)

    def variant(self, kernel: str, norm: int, epilogue: str) -> Variant:
        return Variant(
            kernel,
            f"{self.name}_{'norm' if norm else 'raw'}_{epilogue}",
            {
                "BLOCK_M": self.rows,
                "BLOCK_N": self.columns,
                "BLOCK_K": self.depth,
                "SPLITS": self.splits,
                **_fused(norm, epilogue),
            },
            num_warps=self.warps,
            num_stages=self.stages,
            architectures=self.architectures,
            when={
                "rows": self.for_rows,
                "tiles64": self.tiles,
                "depth": self.for_depth,
                **_when(norm, epilogue),
            },
            wide_tiles=self.columns >= 64,
        )


_ROWS = ((16, (1, 16)), (32, (17, 32)), (64, (33, 64)))
_SPLITS = (
    ("split8", 8, (1, 131), (8192, 2**30)),
    ("split4", 4, (1, 131), (1, 2**30)),
    ("split1", 1, (132, 2**30), (1, 2**30)),
)
TILINGS = tuple(
    Tiling(f"rows{rows}_{label}{suffix}", rows, 64, depth, splits, 4, 3, tiles, reach, architectures, for_depth)
    for suffix, depth, architectures in (("", 128, (HOPPER,)), ("_sm80", 64, (AMPERE, ADA)))
    for rows, reach in _ROWS
    for label, splits, tiles, for_depth in _SPLITS
)


def _gemv_table(name: str, out: str, combinations: tuple[tuple[int, str], ...]) -> Table:
    return Table(
        Kernel(
            name=name,
            entry=f"{_MODULE}:row_gemv_kernel",
            signature={
                "x_ptr": "*T",
                "weight_ptr": "*T",
                "norm_ptr": "*T",
                "residual_ptr": "*T",
                "out_ptr": out,
                "columns": "i32",
                "depth": "i32",
                "eps": "fp32",
            },
            constants=("BLOCK_N", "BLOCK_K", "NORM", "EPILOGUE"),
            divisible=frozenset(("x_ptr", "weight_ptr", "norm_ptr", "depth")),
            chained=True,
        ),
        tuple(
            # Two weights at once leave half of the registers to each.
            gemv_variant(name, norm, epilogue, 2 if epilogue == "silu" else 4, 2048, 4, "columns")
            for norm, epilogue in combinations
        ),
    )


def _gemm_table(name: str, out: str, combinations: tuple[tuple[int, str], ...], tilings: tuple[Tiling, ...]) -> Table:
    return Table(
        Kernel(
            name=name,
            entry=f"{_MODULE}:rows_gemm_kernel",
            signature={
                "x_ptr": "*T",
                "weight_ptr": "*T",
                "norm_ptr": "*T",
                "residual_ptr": "*T",
                "out_ptr": out,
                "part_ptr": "*fp32",
                "counter_ptr": "*i32",
                "x_stride": "i32",
                "residual_stride": "i32",
                "rows": "i32",
                "columns": "i32",
                "depth": "i32",
                "eps": "fp32",
            },
            constants=("BLOCK_M", "BLOCK_N", "BLOCK_K", "SPLITS", "NORM", "EPILOGUE"),
            divisible=frozenset(("x_ptr", "weight_ptr", "norm_ptr", "part_ptr", "x_stride", "depth")),
            chained=True,
        ),
        tuple(
            tiling.variant(name, norm, epilogue)
            for tiling in tilings
            for norm, epilogue in combinations
            # The deepest products are those down to the hidden state.
            if tiling.splits < 8 or epilogue == "residual"
        ),
    )


ROW_GEMV = _gemv_table("row_gemv", "*T", _COMBINATIONS)
ROW_GEMV_FP32 = _gemv_table("row_gemv_fp32", "*fp32", _LOGITS)
ROWS_GEMM = _gemm_table("rows_gemm", "*T", _COMBINATIONS, TILINGS)
# Vocabularies have tiles enough: K is not split for logits, however few the columns.
_WHOLE = tuple(replace(tiling, tiles=(1, 2**30)) for tiling in TILINGS if tiling.splits == 1)
ROWS_GEMM_FP32 = _gemm_table("rows_gemm_fp32", "*fp32", _LOGITS, _WHOLE)
TABLES = (ROW_GEMV, ROW_GEMV_FP32, ROWS_GEMM, ROWS_GEMM_FP32)
_GEMV_GRID = ("ceil_div(columns, BLOCK_N)",)
GEMV_PLAN = LaunchPlan("row_gemv", (Step("row_gemv", _GEMV_GRID),))
GEMM_PLAN = LaunchPlan(
    "rows_gemm",
    (Step("rows_gemm", ("ceil_div(columns, BLOCK_N)", "SPLITS")),),
    workspaces={
        "parts": "4 * ceil_div(columns, BLOCK_N) * SPLITS * (2 * BLOCK_N + 1) * BLOCK_M",
        "counters": "4 * ceil_div(columns, BLOCK_N)",
    },
)
"""The counters must be 0 before the first launch; every launch leaves them so. Streams may not share them."""
PLANS = (GEMV_PLAN, LaunchPlan("row_gemv_fp32", (Step("row_gemv_fp32", _GEMV_GRID),)), GEMM_PLAN)


@dataclass(slots=True)
class Workspace:
    """Scratch for split sums of up to some tiles of columns; one a stream."""

    parts: Tensor
    counters: Tensor

    @classmethod
    def reserve(cls, columns: int, device: torch.device) -> "Workspace":
        """Enough for any row of the tables and any product of at most `columns` columns that they split."""
        sizes = {"parts": 0, "counters": 0}
        for row in ROWS_GEMM.variants:
            limit = min(columns, row.when["tiles64"][1] * 64)
            for name, size in GEMM_PLAN.workspace_bytes({"columns": limit}, row.constants).items():
                sizes[name] = max(sizes[name], size if row.constants["SPLITS"] > 1 else 4)
        return cls(
            torch.empty(sizes["parts"] // 4, dtype=torch.float32, device=device),
            torch.zeros(sizes["counters"] // 4, dtype=torch.int32, device=device),
        )


def small_gemm(
    x: Tensor,
    weight: Tensor,
    workspace: Workspace,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    silu: bool = False,
    out_dtype: torch.dtype | None = None,
    variant: Variant | None = None,
) -> Tensor:
    """x [M, K], 1 <= M <= 64, rows at one stride, K a multiple of 16; weight [N, K] or, with silu, [2 N, K].

    norm [K]: RMSNorm before the product; residual [M, N]: added after it. Returns [M, N] in `out_dtype`, which is x's
    or float32. `variant` forces a row.

    Raises:
        ValueError: more than MAX_ROWS rows, or both epilogues.
        NoVariantError: no row is declared for this fusion.
    """
    rows, depth = x.shape
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"small_gemm takes 1 to {MAX_ROWS} rows, not {rows}; use torch's matmul")
    if residual is not None and silu:
        raise ValueError("a product has one epilogue: residual or silu")
    columns = weight.shape[0] // 2 if silu else weight.shape[0]
    epilogue = SILU if silu else PLAIN if residual is None else RESIDUAL
    wide = out_dtype == torch.float32 and x.dtype != torch.float32
    out = torch.empty(rows, columns, dtype=torch.float32 if wide else x.dtype, device=x.device)
    dims = {
        "rows": rows,
        "columns": columns,
        "depth": depth,
        "tiles64": ceil_div(columns, 64),
        "norm": int(norm is not None),
        "epilogue": epilogue,
    }
    vector = rows == 1 if variant is None else variant.kernel.startswith("row_gemv")
    table = (ROW_GEMV_FP32 if wide else ROW_GEMV) if vector else (ROWS_GEMM_FP32 if wide else ROWS_GEMM)
    row = variant or require(table, x, dims)
    launcher.launch(
        table.kernel,
        row,
        (GEMV_PLAN if vector else GEMM_PLAN).steps[0].blocks(dims, row),
        {
            "x_ptr": x,
            "weight_ptr": weight,
            "norm_ptr": x if norm is None else norm,
            "residual_ptr": x if residual is None else residual,
            "out_ptr": out,
            "part_ptr": workspace.parts,
            "counter_ptr": workspace.counters,
            "x_stride": x.stride(0),
            "residual_stride": 0 if residual is None else residual.stride(0),
            "rows": rows,
            "columns": columns,
            "depth": depth,
            "eps": eps,
        },
    )
    return out
