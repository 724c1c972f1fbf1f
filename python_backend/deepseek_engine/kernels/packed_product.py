"""How products with packed weights are launched, whatever they are packed in."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepseek_engine.kernels import launcher
from deepseek_engine.kernels.dispatch import find, require
from deepseek_engine.kernels.split_sum_triton import sum_parts
from deepseek_engine.kernels.unpacked_product import unpacked_product
from deepseek_engine.kernels.variants import ARCHITECTURES, LaunchPlan, Table, Variant, ceil_div

GEMV_ROWS = 2
"""Rows up to which the product is one of vectors."""
GEMM_ROWS = 64
"""Rows up to which tiles unpack the weight; for more it is unpacked once, as it is read again and again."""

Arguments = Mapping[str, Tensor | int | float]


@dataclass(frozen=True, slots=True)
class Tiling:
    """A tile of the product for a range of rows and of tiles of 64 columns.

    Attributes:
        stack_bytes: as the row states it.
        constants: of the form's kernel, beside those of every tile.
    """

    name: str
    rows: int
    columns: int
    depth: int
    splits: int
    warps: int
    stages: int
    for_rows: tuple[int, int]
    tiles: tuple[int, int] = (1, 2**30)
    architectures: tuple[int, ...] = ARCHITECTURES
    stack_bytes: int = 0
    constants: Mapping[str, int] = field(default_factory=dict)

    def variant(self, kernel: str) -> Variant:
        sizes = {"BLOCK_M": self.rows, "BLOCK_N": self.columns, "BLOCK_K": self.depth, "SPLITS": self.splits}
        return Variant(
            kernel,
            self.name,
            {**sizes, **self.constants},
            num_warps=self.warps,
            num_stages=self.stages,
            stack_bytes=self.stack_bytes,
            architectures=self.architectures,
            when={"rows": self.for_rows, "tiles64": self.tiles},
            wide_tiles=True,
        )


@dataclass(frozen=True, slots=True)
class PackedKernels:
    """The kernels of one form of weight, each with its launch plan.

    Attributes:
        gemv: few rows.
        gemm: some, in tiles, with K split where they are few.
        any: sizes that the other ones do not take.
        unpack: writes rows of the weight; launched over `part` of them and `unit` pieces of their columns.
        unit: the argument that counts those.
        rows: a twin of `gemv` and `gemm` without an interpreter, for what its table's rows take.
    """

    gemv: tuple[Table, LaunchPlan]
    gemm: tuple[Table, LaunchPlan]
    any: tuple[Table, LaunchPlan]
    unpack: tuple[Table, LaunchPlan]
    unit: str
    rows: tuple[Table, LaunchPlan] | None = None

    def multiply(
        self,
        x: Tensor,
        columns: int,
        arguments: Arguments,
        *,
        bias: Tensor | None,
        residual: Tensor | None,
        vectors: Arguments | None,
        variant: Variant | None,
    ) -> Tensor:
        """x [M, K] w^T + bias [N] + residual [M, N]; all contiguous. Returns a new [M, N].

        Args:
            columns: N.
            arguments: of the form, for all its kernels.
            vectors: what the kernels of few rows take in their place; None where only `any` takes the sizes.
            variant: forces a row of `gemv`, `gemm` or `rows`.
        """
        rows, depth = x.shape
        out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
        dims = {"rows": rows, "columns": columns, "tiles64": ceil_div(columns, 64)}
        given: dict[str, Tensor | int | float] = {
            "x_ptr": x,
            "bias_ptr": x if bias is None else bias,
            "residual_ptr": x if residual is None else residual,
            "out_ptr": out,
            "rows": rows,
            "columns": columns,
            "depth": depth,
            "with_bias": int(bias is not None),
            "with_residual": int(residual is not None),
            **arguments,
        }
        if vectors is None:
            _launch(self.any, require(self.any[0], x, dims), dims, given)
            return out
        pieces = {self.unit: int(arguments[self.unit])}
        if self.rows is not None and (twin := _twin(self.rows[0], x, dims | pieces, variant)) is not None:
            _launch(self.rows, twin, dims, {**given, **vectors})
            return out
        if rows > GEMM_ROWS and variant is None:
            unpack = require(self.unpack[0], x, pieces)

            def write(first: int, part: Tensor) -> None:
                sizes = {"part": part.shape[0], **pieces}
                _launch(self.unpack, unpack, sizes, {**given, "out_ptr": part, "first": first})

            return unpacked_product(x, write, out, bias, residual)
        if rows <= GEMV_ROWS if variant is None else variant.kernel == self.gemv[0].kernel.name:
            _launch(self.gemv, variant or require(self.gemv[0], x, dims), dims, {**given, **vectors})
            return out
        row = variant or require(self.gemm[0], x, dims)
        splits = row.constants["SPLITS"]
        parts = torch.empty(splits if splits > 1 else 0, rows, columns, dtype=torch.float32, device=x.device)
        _launch(self.gemm, row, dims, {**given, "part_ptr": parts})
        return sum_parts(parts, out, bias, residual) if splits > 1 else out


def _twin(table: Table, x: Tensor, dims: dict[str, int], variant: Variant | None) -> Variant | None:
    """The row of a twin that takes the sizes, or that is forced."""
    if variant is not None:
        return variant if variant.kernel == table.kernel.name else None
    return None if launcher.interpreting() else find(table, x, dims)


def _launch(kernel: tuple[Table, LaunchPlan], row: Variant, dims: dict[str, int], arguments: Arguments) -> None:
    table, plan = kernel
    launcher.launch(table.kernel, row, plan.steps[0].blocks(dims, row), arguments)
