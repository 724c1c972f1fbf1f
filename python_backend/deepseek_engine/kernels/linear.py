"""Linear projection with weights stored input-major."""

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight + bias, for x [T, in], weight [in, out] and bias [out].

    Checkpoints store [out, in]. Laid out as [in, out], the product of a few rows takes a CPU half the time.
    """
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def input_major(*weights: Tensor) -> Tensor:
    """Weights [out_i, in] of a checkpoint as one contiguous [in, sum of out_i]."""
    joined = weights[0].new_empty(weights[0].shape[1], sum(weight.shape[0] for weight in weights))
    start = 0
    for weight in weights:
        joined.narrow(1, start, weight.shape[0]).copy_(weight.t())
        start += weight.shape[0]
    return joined
