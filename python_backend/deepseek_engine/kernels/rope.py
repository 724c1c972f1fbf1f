"""Rotary position embedding on interleaved pairs."""

import torch
from torch import Tensor

from deepseek_engine.kernels.scalar import scalar


def rotations(positions: Tensor, inv_freq: Tensor, factor: float) -> Tensor:
    """factor * exp(i * position * inv_freq).

    positions int64 [T], inv_freq float32 [d / 2]; returns complex64 [T, 1, d / 2], ready to broadcast over heads.
    """
    angles = positions.unsqueeze(-1) * inv_freq
    return torch.polar(scalar(factor, angles.device).expand_as(angles), angles).unsqueeze(1)


def rope_table(inv_freq: Tensor, factor: float, positions: int) -> Tensor:
    """float32 [positions, 2 * (d / 2)]: factor * cosines, then factor * sines, of position * inv_freq.

    inv_freq float32 [d / 2]. The angles are products in float32, as in `rotations`.
    """
    angles = torch.arange(positions, dtype=torch.float32, device=inv_freq.device).unsqueeze(-1) * inv_freq
    return torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1)


def rotate_pairs_(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn each pair (x[2i], x[2i + 1]), read as a complex number, by rotation[i], in place.

    x [T, heads, d], its last stride 1 and the others even; rotation complex64 [T, 1, d / 2]. Computed in float32.
    Returns x. This is the layout of DeepSeek's checkpoints (RoFormer, arXiv:2104.09864, equation 34); those with halves
    apart are re-ordered by `interleaving` when they are loaded.
    """
    if x.dtype != torch.float32:
        return x.copy_(rotate_pairs_(x.float(), rotation))
    torch.view_as_complex(x.view(*x.shape[:-1], -1, 2)).mul_(rotation)
    return x


def interleaving(dim: int) -> Tensor:
    """int64 [dim]: the order that brings halves (x[i], x[i + dim / 2]) together as pairs.

    A query and a key that are re-ordered alike have the same dot product, so rows of their projections may be.
    """
    return torch.arange(dim).view(2, dim // 2).t().reshape(-1)
