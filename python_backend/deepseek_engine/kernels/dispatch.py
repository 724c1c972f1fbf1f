"""Chooses the implementation of an operator by device, dtype and shape, and tells what it chose.

Reading this module needs no triton: on a CPU the references serve, and that is no fallback. On a GPU a row of the
operator's variant table serves; where none fits, the reference does, which is counted and logged once a cause.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from deepseek_engine.kernels.variants import Table, Variant

_log = logging.getLogger(__name__)

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class NoVariantError(LookupError):
    """No row of a kernel's table fits the device, dtype and shape."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What serves an operator; `variant` is None for the reference."""

    operator: str
    variant: Variant | None
    reason: str


class Dispatch:
    """The choices of one process.

    Attributes:
        fallbacks: (operator, cause) to the number of times that a reference served on a GPU.
        choices: operator to its latest choice, for `piccard doctor`.
    """

    def __init__(self) -> None:
        self.fallbacks: Counter[tuple[str, str]] = Counter()
        self.choices: dict[str, Choice] = {}

    def choose(self, table: Table, capability: int | None, dtype: str, dims: Mapping[str, int]) -> Choice:
        """A row for a device of `capability` (None: not a GPU), or the reference with the cause."""
        operator = table.kernel.name
        if capability is None:
            choice = Choice(operator, None, "the device is a CPU")
        else:
            variant = table.choose(capability, dtype, dims)
            if variant is not None:
                choice = Choice(operator, variant, f"row {variant.name} fits {_described(capability, dtype, dims)}")
            else:
                choice = Choice(operator, None, f"no row fits {_described(capability, dtype, dims)}")
                self._fall_back(choice)
        self.choices[operator] = choice
        return choice

    def _fall_back(self, choice: Choice) -> None:
        key = (choice.operator, choice.reason)
        self.fallbacks[key] += 1
        if self.fallbacks[key] == 1:
            _log.warning("%s runs its torch reference: %s", choice.operator, choice.reason)


DISPATCH = Dispatch()


def require(table: Table, like: Tensor, dims: Mapping[str, int]) -> Variant:
    """The row for a tensor's device and dtype.

    Raises:
        NoVariantError: none fits; ask `DISPATCH.choose` first where a reference can stand in.
    """
    dtype = _dtype_name(like.dtype)
    capability = _capability(like.device)
    variant = _chosen(table, capability, dtype, tuple(dims.items()))
    if variant is None:
        raise NoVariantError(f"kernel {table.kernel.name}: no row fits {_described(capability, dtype, dims)}")
    return variant


@lru_cache(maxsize=4096)
def _chosen(table: Table, capability: int, dtype: str, dims: tuple[tuple[str, int], ...]) -> Variant | None:
    """A step asks once a layer, and a table has dozens of rows."""
    return table.choose(capability, dtype, dict(dims))


def _dtype_name(dtype: torch.dtype) -> str:
    from deepseek_engine.kernels.launcher import interpreting

    # The interpreter computes float32 rightly and bfloat16 not: it takes the rows of the half types for it.
    return "fp16" if interpreting() else _DTYPES.get(dtype, str(dtype))


def _capability(device: torch.device) -> int:
    from deepseek_engine.kernels.launcher import capability

    return capability(device)


def _described(capability: int, dtype: str, dims: Mapping[str, int]) -> str:
    return f"sm_{capability}, {dtype}, " + ", ".join(f"{name} {value}" for name, value in dims.items())
