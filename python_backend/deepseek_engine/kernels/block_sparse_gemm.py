"""The product of a block-sparse matrix with a dense one, the plain form."""

from torch import Tensor

SIDE = 8
"""Rows and columns of a block of the mask."""


def block_sparse_gemm(a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
    """(a where its blocks are present, else 0) b.

    a [M, K], b [K, N]; mask bool [ceil(M / 8), ceil(K / 8)]. Returns [M, N]; what `a` holds in absent blocks, NaN even,
    does not count.
    """
    present = mask.repeat_interleave(SIDE, 0)[: a.shape[0]].repeat_interleave(SIDE, 1)[:, : a.shape[1]]
    return a.masked_fill(~present, 0.0) @ b
