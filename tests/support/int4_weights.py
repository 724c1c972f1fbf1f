"""What packed weights of four bits stand for: w = (q - zero) * scale, as the page of DeepSeekMatMulInt4 has it."""

import torch
from torch import Tensor


def dequantized(q: Tensor, scales: Tensor, zeros: Tensor | None, columns: int, group_size: int) -> Tensor:
    """float32 [..., N, columns] of q uint8 [..., N, ceil(columns / 2)], scales and zeros [..., N, groups]."""
    values = torch.stack((q & 15, q >> 4), dim=-1).flatten(-2)[..., :columns].float()
    group = torch.arange(columns) // group_size
    zero = 8.0 if zeros is None else zeros[..., group].float()
    return (values - zero) * scales[..., group].float()
