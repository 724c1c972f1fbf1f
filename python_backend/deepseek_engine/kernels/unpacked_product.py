"""Products of many rows with a packed weight: it is unpacked part by part, and the library multiplies."""

from collections.abc import Callable

import torch
from torch import Tensor

UNPACKED_BYTES = 128 << 20
"""Scratch memory for a part of the weight, at most; a row where that holds none."""
WHOLE_ROWS = 256
"""What the rows of a part are a multiple of where they are more: cuBLAS is several times slower at odd widths."""


def rows_a_part(columns: int, depth: int, element_bytes: int) -> int:
    """Rows of the weight [columns, depth] that are unpacked at a time."""
    most = max(1, UNPACKED_BYTES // (depth * element_bytes))
    return min(columns, most if most < WHOLE_ROWS else most // WHOLE_ROWS * WHOLE_ROWS)


def unpacked_product(
    x: Tensor, unpack: Callable[[int, Tensor], None], out: Tensor, bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    """Write x [M, K] w^T + bias [N] + residual [M, N] to out [M, N], which is returned.

    unpack(first, part) writes the weight's rows from `first` on to part [rows, K] in x's dtype.
    """
    columns, depth = out.shape[1], x.shape[1]
    most = rows_a_part(columns, depth, x.element_size())
    scratch = torch.empty(most, depth, dtype=x.dtype, device=x.device)
    for first in range(0, columns, most):
        part = scratch[: columns - first]
        unpack(first, part)
        target = out[:, first : first + most]
        if bias is None:
            torch.mm(x, part.t(), out=target)
        else:
            torch.addmm(bias[first : first + most], x, part.t(), out=target)
    return out if residual is None else out.add_(residual)
