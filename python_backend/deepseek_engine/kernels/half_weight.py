"""Weights packed in half precision for products in float32 on a CPU."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

PACKED_ELEMENTS = 1 << 22
"""Packing takes about 80 ns an element, so a larger matrix would hold up the start."""


class HalfWeight:
    """A weight [in, out] in float16, laid out for FBGEMM's product with float32 rows.

    The sums are float32. Of a few rows the product is bound by reading and re-ordering the weight: packed once and half
    as large, that takes an AVX2 core a half to a third of the time of a float32 product, and is no slower at 512 rows.
    """

    __slots__ = ("_packed",)

    def __init__(self, packed: Any) -> None:
        self._packed = packed

    @classmethod
    def of(cls, weight: Tensor) -> "HalfWeight | None":
        """The packed weight, for a float32 [in, out] on the CPU that float16 holds; else None.

        Weights from bfloat16 are held exactly down to 2^-17, where float16 runs out of bits. What is lost below has to
        be no more than float32 sums round off anyway, for every output w: |w - half(w)| <= 2^-22 |w|, Euclidean.
        """
        if weight.dtype != torch.float32 or weight.device.type != "cpu" or weight.numel() > PACKED_ELEMENTS:
            return None
        lost = torch.linalg.vector_norm(weight - weight.half().float(), dim=0)
        # A weight that is not finite in float16 compares as false.
        held = lost <= 2.0**-22 * torch.linalg.vector_norm(weight, dim=0)
        if not _available() or not bool(held.all()):
            return None
        return cls(_pack(weight))

    def product(self, x: Tensor) -> Tensor:
        """x [T, in] float32 -> x weight, a new [T, out]."""
        result: Tensor = torch.ops.quantized.linear_dynamic_fp16.default(x, self._packed)
        return result


def _pack(weight: Tensor) -> Any:
    return torch.ops.quantized.linear_prepack_fp16.default(weight.t().contiguous(), None)


@lru_cache(maxsize=1)
def _available() -> bool:
    """Whether this build of torch and this processor have the product."""
    try:
        HalfWeight(_pack(torch.ones(8, 8))).product(torch.ones(1, 8))
    except (RuntimeError, NotImplementedError, AttributeError):
        return False
    return True
