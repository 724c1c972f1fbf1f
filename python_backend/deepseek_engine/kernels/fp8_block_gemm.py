"""Products with e4m3 weights that have a scale a block of rows and columns, the form of DeepSeek-V3's checkpoints."""

import torch
from torch import Tensor


def dequantized_blocks(weight: Tensor, scale_inv: Tensor, block: tuple[int, int]) -> Tensor:
    """float32 [N, K]: e4m3(weight[n, k]) * scale_inv[n // rows, k // columns] for blocks of (rows, columns).

    weight float8_e4m3fn or its bytes [N, K]; scale_inv float32 [ceil(N / rows), ceil(K / columns)]
    (DeepSeek-V3, arXiv:2412.19437, section 3.3.2).
    """
    rows, columns = (
        torch.arange(size, device=weight.device) // part for size, part in zip(weight.shape, block, strict=True)
    )
    return weight.view(torch.float8_e4m3fn).float() * scale_inv[rows][:, columns]


def fp8_block_linear(
    x: Tensor,
    weight: Tensor,
    scale_inv: Tensor,
    block: tuple[int, int],
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """x w^T + bias + residual for x [T, K], the weight [N, K] of `dequantized_blocks`, bias [N] and residual [T, N].

    A new [T, N] in x's dtype, the product in float32, in float64 for such an x.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    y = wide @ dequantized_blocks(weight, scale_inv, block).to(wide.dtype).t()
    for added in (bias, residual):
        if added is not None:
            y += added
    return y.to(x.dtype)
