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
from piccard_contract.operators import NOTHING, REFERENCE
from torch import Tensor

from deepseek_engine.kernels.variants import Table, Variant, nearest_architecture

_log = logging.getLogger(__name__)

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
DTYPES_ON_GPU = (torch.bfloat16, torch.float16)
"""What device kernels are declared for (`variants.DTYPES`)."""


class NoVariantError(LookupError):
    """No row of a kernel's table fits the device, dtype and shape."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What serves an operator; `variant` is None for the reference."""

    operator: str
    variant: Variant | None
    reason: str


@dataclass(slots=True)
class Served:
    """One implementation that was chosen for an operator.

    Attributes:
        implementation: the row's name, or LIBRARY, REFERENCE or NOTHING of `piccard_contract.operators`.
        reason: why, told of the shape it was chosen for first.
        choices: shapes it was chosen for. Choices are kept, so launches are not counted.
        fallback: whether it is a reference in a kernel's place.
        seconds: what it takes of a step on a GPU, measured once; None where it was not.
    """

    implementation: str
    reason: str
    choices: int = 0
    fallback: bool = False
    seconds: float | None = None


class Dispatch:
    """The choices of one process. One thread makes them; any may read copies.

    Attributes:
        fallbacks: (operator, cause) to the number of times that a reference served on a GPU. Causes are few: they name
            no shape.
        choices: operator to its latest choice, for `piccard doctor`.
        served: (operator, implementation) to what is known of it.
        revision: grows whenever `served` has something new.
    """

    def __init__(self) -> None:
        self.fallbacks: Counter[tuple[str, str]] = Counter()
        self.choices: dict[str, Choice] = {}
        self.served: dict[tuple[str, str], Served] = {}
        self.revision = 0

    def choose(self, table: Table, capability: int | None, dtype: str, dims: Mapping[str, int]) -> Choice:
        """A row for a device of `capability` (None: not a GPU), or the reference with the cause."""
        operator = table.kernel.name
        if capability is None:
            choice = Choice(operator, None, "the device is a CPU")
            self.record(choice, REFERENCE)
            return choice
        choice = self.seek(table, capability, dtype, dims)
        if choice.variant is None:
            self.record(choice, REFERENCE, fallback=True)
            self.fall_back(operator, _cause(table, capability, dtype), choice.reason)
        return choice

    def seek(self, table: Table, capability: int, dtype: str, dims: Mapping[str, int]) -> Choice:
        """A row for a GPU, recorded; or None with the reason, which is the caller's to record."""
        operator, shape = table.kernel.name, _described(capability, dtype, dims)
        variant = table.choose(capability, dtype, dims)
        if variant is None:
            return Choice(operator, None, f"no row fits {shape}")
        choice = Choice(operator, variant, f"row {variant.name} fits {shape}")
        self.record(choice, variant.name)
        return choice

    def record(self, choice: Choice, implementation: str, *, fallback: bool = False) -> Served:
        """Keep what serves an operator, and why."""
        self.choices[choice.operator] = choice
        key = (choice.operator, implementation)
        if key not in self.served:
            self.served[key] = Served(implementation, choice.reason, fallback=fallback)
            self.revision += 1
        served = self.served[key]
        served.choices += 1
        return served

    def fall_back(self, operator: str, cause: str, reason: str) -> None:
        """Count that a reference served on a GPU; the first one of a cause is logged."""
        key = (operator, cause)
        self.fallbacks[key] += 1
        if self.fallbacks[key] == 1:
            _log.warning("%s runs its torch reference: %s", operator, reason)


DISPATCH = Dispatch()


def require(table: Table, like: Tensor, dims: Mapping[str, int]) -> Variant:
    """The row for a tensor's device and dtype.

    Raises:
        NoVariantError: none fits; ask `DISPATCH.choose` first where a reference can stand in.
    """
    choice = _chosen(table, _capability(like.device), _dtype_name(like.dtype), tuple(dims.items()))
    if choice.variant is None:
        raise NoVariantError(f"kernel {table.kernel.name}: {choice.reason}")
    return choice.variant


def find(table: Table, like: Tensor, dims: Mapping[str, int]) -> Variant | None:
    """The row for a tensor's device and dtype of a kernel that another one stands in for, or None."""
    return _found(table, _capability(like.device), _dtype_name(like.dtype), tuple(dims.items()))


@lru_cache(maxsize=4096)
def _found(table: Table, capability: int, dtype: str, dims: tuple[tuple[str, int], ...]) -> Variant | None:
    return DISPATCH.seek(table, capability, dtype, dict(dims)).variant


@lru_cache(maxsize=4096)
def _chosen(table: Table, capability: int, dtype: str, dims: tuple[tuple[str, int], ...]) -> Choice:
    """A step asks once a layer, and a table has dozens of rows. So it is recorded once a shape, not once a launch."""
    choice = DISPATCH.seek(table, capability, dtype, dict(dims))
    if choice.variant is None:
        DISPATCH.record(choice, NOTHING)
    return choice


def _cause(table: Table, capability: int, dtype: str) -> str:
    """Why no row fits, in words that name no shape."""
    if nearest_architecture(capability) is None:
        return f"no rows for sm_{capability}"
    if table.kernel.is_typed and not any(dtype in row.dtypes for row in table.variants):
        return f"no rows for {dtype}"
    return "no row for the shape"


def _dtype_name(dtype: torch.dtype) -> str:
    from deepseek_engine.kernels.launcher import interpreting

    # The interpreter computes float32 rightly and bfloat16 not: it takes the rows of the half types for it.
    return "fp16" if interpreting() else _DTYPES.get(dtype, str(dtype))


def _capability(device: torch.device) -> int:
    from deepseek_engine.kernels.launcher import capability

    return capability(device)


def _described(capability: int, dtype: str, dims: Mapping[str, int]) -> str:
    return f"sm_{capability}, {dtype}, " + ", ".join(f"{name} {value}" for name, value in dims.items())
