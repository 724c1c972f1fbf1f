"""Products with weights of four bits, two columns a byte, with a scale and a zero a group of columns."""

import torch
from torch import Tensor


def dequantized(q: Tensor, scales: Tensor, zeros: Tensor | None, columns: int, group_size: int) -> Tensor:
    """What packed weights stand for: w = (q - zero) * scale, float32 [..., N, columns].

    q uint8 [..., N, ceil(columns / 2)], the even column in a byte's low half; scales [..., N, groups] and zeros uint8
    alike, 8 if absent; a group is `group_size` columns, the last may be short.
    """
    values = torch.stack((q & 15, q >> 4), dim=-1).flatten(-2)[..., :columns].float()
    group = torch.arange(columns, device=q.device) // group_size
    zero = 8.0 if zeros is None else zeros[..., group].float()
    return (values - zero) * scales[..., group].float()


def int4_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group_size: int,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """x w^T + bias + residual for x [T, K], the packed weight [N, K] of `dequantized`, bias [N] and residual [T, N].

    A new [T, N] in x's dtype, the product in float32, in float64 for such an x.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    y = wide @ dequantized(weight, scales, zeros, x.shape[1], group_size).to(wide.dtype).t()
    for added in (bias, residual):
        if added is not None:
            y += added
    return y.to(x.dtype)
