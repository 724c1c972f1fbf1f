"""Root-mean-square normalisation."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * cast(x / sqrt(mean(x^2) + eps)), over the last dimension.

    x [..., D] and weight [D] of one dtype; returns x's shape and dtype. The mean is taken in float32 and the result is
    cast back *before* it is multiplied by the weight, as Llama and DeepSeek checkpoints were trained (Zhang and
    Sennrich, arXiv:1910.07467, for the formula).
    """
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normalised.to(x.dtype)
