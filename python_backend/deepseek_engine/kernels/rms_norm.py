"""Root-mean-square normalisation (Zhang and Sennrich, arXiv:1910.07467).

The mean is taken in float32 and the result is cast back *before* it is multiplied by the weight, the order in which
Llama and DeepSeek checkpoints were trained; in bfloat16 it matters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from deepseek_engine.kernels.scalar import scalar


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * cast(x / sqrt(mean(x^2) + eps)), over the last dimension.

    x [..., D] and weight [D] of one dtype; returns x's shape and dtype.
    """
    wide = _wide(x)
    if x.dim() == 2:
        # One product and not three operators.
        scale = torch.addmm(scalar(eps, x.device), wide * wide, _averaging(x.shape[-1], x.device)).rsqrt_()
    else:
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.addcmul(scalar(eps, x.device), norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(weight)


@dataclass(slots=True)
class SegmentNorm:
    """Several rms_norms, each over its own columns of one matrix, in the time of one; the other columns pass.

    On a CPU a step of a small model is bound by the number of operator calls. So the segments' means come from one
    product with a matrix of 1 / width, and one more spreads the scales over the columns.
    """

    mean: Tensor
    """float32 [N, segments]: 1 / width in a segment's rows, else 0."""
    spread: Tensor
    """float32 [segments, N]: 1 in a segment's columns, else 0."""
    passing: Tensor
    """float32 [N]: 1 in the columns of no segment, else 0."""
    weight: Tensor
    """[N] of the model's dtype: the segments' weights, and 1 in the columns of none."""
    eps: float

    @classmethod
    def over(cls, width: int, segments: Sequence[tuple[int, Tensor]], eps: float) -> "SegmentNorm":
        """For rows of `width` columns; a segment is its first column and its weight."""
        first = segments[0][1]
        spread = torch.zeros(len(segments), width, device=first.device)
        weight = torch.ones(width, dtype=first.dtype, device=first.device)
        for index, (start, segment) in enumerate(segments):
            spread[index, start : start + segment.shape[0]] = 1.0
            weight[start : start + segment.shape[0]] = segment
        mean = (spread / spread.sum(-1, keepdim=True)).t().contiguous()
        return cls(mean=mean, spread=spread, passing=1.0 - spread.sum(0), weight=weight, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, N]; returns its shape and dtype."""
        wide = _wide(x)
        scales = torch.addmm(scalar(self.eps, x.device), wide * wide, self.mean).rsqrt_()
        normalised = torch.addmm(self.passing, scales, self.spread).mul_(wide)
        return normalised.to(x.dtype).mul_(self.weight)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float32 else x.float()


@lru_cache(maxsize=16)
def _averaging(width: int, device: torch.device) -> Tensor:
    """[width, 1] of 1 / width."""
    return torch.full((width, 1), 1.0 / width, device=device)
