"""Linear projections on a GPU."""

from dataclasses import dataclass

import torch
from piccard_contract.operators import LIBRARY
from torch import Tensor

from deepseek_engine.kernels.dispatch import DISPATCH, Choice
from deepseek_engine.kernels.head_gemm_triton import head_gemm
from deepseek_engine.kernels.small_gemm_triton import Workspace, small_gemm
from deepseek_engine.kernels.swiglu_triton import swiglu


def fixed_product(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """x weight^T in one tile whatever T is; x [T, in], weight [out, in], `out` [T, out] of x's dtype or float32."""
    wide = None if out is None else out.unsqueeze(1)
    return head_gemm(x.unsqueeze(1), weight.unsqueeze(0), by_column=True, fixed=True, out=wide).squeeze(1)


@dataclass(slots=True)
class Product:
    """x weight^T + bias.

    One row is bound by reading the weight: a matrix-vector kernel does it; from two rows on the library's products are
    as fast or faster (H200).
    """

    weight: Tensor
    """[out, in], as checkpoints have it."""
    workspace: Workspace
    bias: Tensor | None = None
    fixed: bool = False
    """Whether a row's sum is to have one order whatever else is in the batch: one tile of our own for any number."""

    def __post_init__(self) -> None:
        if not self.fixed:
            reason = "from two rows on the library's products are as fast or faster"
            DISPATCH.record(Choice("product", None, reason), LIBRARY)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in], rows at one stride -> a new [T, out]."""
        if self.fixed:
            out = fixed_product(x, self.weight)
            return out if self.bias is None else out.add_(self.bias)
        if x.shape[0] == 1:
            out = small_gemm(x, self.weight, self.workspace)
            return out if self.bias is None else out.add_(self.bias)
        if self.bias is not None:
            return torch.addmm(self.bias, x, self.weight.t())
        return torch.mm(x, self.weight.t())

    def gated(self, x: Tensor) -> Tensor:
        """silu(gate) * up for a weight [gate; up]; x [T, in] -> a new [T, out / 2]."""
        if self.fixed:
            return swiglu(fixed_product(x, self.weight))
        if x.shape[0] == 1:
            return small_gemm(x, self.weight, self.workspace, silu=True)
        return swiglu(torch.mm(x, self.weight.t()))

    def logits(self, x: Tensor, out: Tensor) -> None:
        """Into `out` float32 [T, vocabulary], which rounds to no half type on the way."""
        if self.fixed:
            fixed_product(x, self.weight, out)
        elif x.shape[0] == 1:
            out.copy_(small_gemm(x, self.weight, self.workspace, out_dtype=torch.float32))
        elif x.is_cuda and x.dtype != torch.float32:
            torch.mm(x, self.weight.t(), out_dtype=torch.float32, out=out)
        else:
            out.copy_(torch.mm(x, self.weight.t()))
