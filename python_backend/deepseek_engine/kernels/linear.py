"""Linear projection with weights stored input-major."""

import torch
from torch import Tensor

from deepseek_engine.kernels.half_weight import HalfWeight

Weight = Tensor | HalfWeight
"""[in, out]."""


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x weight + bias, for x [T, in], weight [in, out] and bias [out]; a new tensor.

    Checkpoints store [out, in]. Laid out as [in, out], the product of a few rows takes a CPU half the time.
    """
    if isinstance(weight, HalfWeight):
        product = weight.product(x)
        return product if bias is None else product.add_(bias)
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def add_linear(residual: Tensor, x: Tensor, weight: Weight) -> Tensor:
    """residual + x weight, for residual [T, out]; a new tensor."""
    if isinstance(weight, HalfWeight):
        return weight.product(x).add_(residual)
    return torch.addmm(residual, x, weight)


def input_major(*weights: Tensor) -> Tensor:
    """Weights [out_i, in] of a checkpoint as one contiguous [in, sum of out_i]."""
    joined = weights[0].new_empty(weights[0].shape[1], sum(weight.shape[0] for weight in weights))
    start = 0
    for weight in weights:
        joined.narrow(1, start, weight.shape[0]).copy_(weight.t())
        start += weight.shape[0]
    return joined


def packed(weight: Tensor) -> Weight:
    """The fastest form of a weight [in, out] that holds it."""
    return HalfWeight.of(weight) or weight
