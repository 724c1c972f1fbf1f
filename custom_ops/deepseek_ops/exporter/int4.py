"""Weights of four bits: groups of columns with a scale and a zero, rounded to nearest, packed two columns a byte."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST = 15
PART = 1 << 22
"""Elements that are packed at once: what is made of them in float32 on the way stays small beside a layer."""


@dataclass(frozen=True, slots=True)
class PackedInt4:
    """w[..., k] = (q[..., k] - zeros[..., g]) * scales[..., g], g = k // group_size, for a weight [..., N, K].

    Attributes:
        q: uint8 [..., N, ceil(K / 2)], the even column in a byte's low half.
        scales: [..., N, ceil(K / group_size)] in the weight's dtype.
        zeros: uint8, as scales; 0 to 15.
    """

    q: Tensor
    scales: Tensor
    zeros: Tensor

    @classmethod
    def joined(cls, parts: list["PackedInt4"]) -> "PackedInt4":
        """The rows of all parts one after the other."""
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in ("q", "scales", "zeros")))

    @classmethod
    def stacked(cls, parts: list["PackedInt4"]) -> "PackedInt4":
        """Weights of one shape along a new first dimension."""
        return cls(*(torch.stack([getattr(part, name) for part in parts]) for name in ("q", "scales", "zeros")))


def pack_int4(weight: Tensor, group_size: int) -> PackedInt4:
    """The nearest of 16 evenly spaced values a group, which hold 0 and reach its least and its largest element.

    So no element is off by more than half a step, its group's scale, but for float32's own rounding. weight [N, K];
    group_size a multiple of 8, the last group may be short. Raises ValueError where a value is not finite.
    """
    rows = max(1, PART // weight.shape[1])
    return PackedInt4.joined([_pack(part, group_size) for part in weight.split(rows)])


def _pack(weight: Tensor, group_size: int) -> PackedInt4:
    rows, columns = weight.shape
    groups = F.pad(weight.float(), (0, -columns % group_size)).view(rows, -1, group_size)
    low, high = groups.amin(-1).clamp_(max=0.0), groups.amax(-1).clamp_(min=0.0)
    # Divided before the difference, which may be beyond float32.
    scales = _not_below(high / LARGEST - low / LARGEST, weight.dtype)
    if not bool(torch.isfinite(scales).all()):
        raise ValueError("a value is not finite")
    steps = scales.float()
    zeros = (low / steps).neg_().round_()
    q = (groups / steps.unsqueeze(-1)).round_().add_(zeros.unsqueeze(-1)).clamp_(0, LARGEST)
    pairs = q.to(torch.uint8).view(rows, -1)[:, : columns + columns % 2]
    return PackedInt4(pairs[:, 0::2] | pairs[:, 1::2] << 4, scales, zeros.to(torch.uint8))


def _not_below(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The least values of a dtype that are not below; of a group of zeros too, a scale that can be divided by."""
    limits = torch.finfo(dtype)
    # Half floats begin where weights still are; those below the normal range serve as well.
    least = limits.tiny * limits.eps if dtype == torch.float16 else limits.tiny
    values = values.clamp(min=least)
    rounded = values.to(dtype)
    above = torch.nextafter(rounded, torch.full_like(rounded, float("inf")))
    return torch.where(rounded.float() < values, above, rounded)
