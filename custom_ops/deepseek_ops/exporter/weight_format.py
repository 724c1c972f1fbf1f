"""How the weights of products are written, and which operators read them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from deepseek_engine.models import CheckpointError
from torch import Tensor

from deepseek_ops.exporter.int4 import PackedInt4, pack_int4
from deepseek_ops.exporter.weight_files import WeightFiles


class WeightFormat(Protocol):
    """One of them; `attributes` are those of the operators beside the ones that every format has."""

    @property
    def attributes(self) -> Mapping[str, int]: ...

    def operator(self, name: str) -> str:
        """The form of DeepSeekMatMul or DeepSeekMoE that reads the format."""

    def add(self, files: WeightFiles, parameter: str, name: str, weight: Tensor) -> dict[str, str]:
        """Write a weight [N, K]; returns the operator's inputs, of which `parameter` is the weight's, and their values.

        Raises CheckpointError where the format does not hold the weight.
        """

    def add_stack(
        self, files: WeightFiles, parameter: str, name: str, weights: Iterable[Tensor], count: int
    ) -> dict[str, str]:
        """As `add`, for `count` weights of one shape as [E, N, K]; they come one after the other."""


@dataclass(frozen=True, slots=True)
class PlainFormat:
    """Elements in the checkpoint's own type."""

    attributes: Mapping[str, int] = field(default_factory=dict)

    def operator(self, name: str) -> str:
        return name

    def add(self, files: WeightFiles, parameter: str, name: str, weight: Tensor) -> dict[str, str]:
        return {parameter: files.add(name, weight)}

    def add_stack(
        self, files: WeightFiles, parameter: str, name: str, weights: Iterable[Tensor], count: int
    ) -> dict[str, str]:
        whole = None
        for index, weight in enumerate(weights):
            if whole is None:
                whole = weight.new_empty(count, *weight.shape)
            whole[index] = weight
        assert whole is not None
        return self.add(files, parameter, name, whole)


@dataclass(frozen=True, slots=True)
class Int4Format:
    """Four bits, as DeepSeekMatMulInt4 has them.

    Attributes:
        group_size: columns that share a scale and a zero; a multiple of 8.
    """

    group_size: int = 32

    def __post_init__(self) -> None:
        if self.group_size < 8 or self.group_size % 8:
            raise ValueError(f"group_size is {self.group_size}; it has to be a multiple of 8")

    @property
    def attributes(self) -> Mapping[str, int]:
        return {"group_size": self.group_size}

    def operator(self, name: str) -> str:
        return f"{name}Int4"

    def add(self, files: WeightFiles, parameter: str, name: str, weight: Tensor) -> dict[str, str]:
        return _added(files, parameter, name, self._packed(name, weight))

    def add_stack(
        self, files: WeightFiles, parameter: str, name: str, weights: Iterable[Tensor], count: int
    ) -> dict[str, str]:
        # One after the other: of a layer's experts only one is there as the checkpoint has it.
        return _added(files, parameter, name, PackedInt4.stacked([self._packed(name, weight) for weight in weights]))

    def _packed(self, name: str, weight: Tensor) -> PackedInt4:
        try:
            return pack_int4(weight, self.group_size)
        except ValueError:
            raise CheckpointError(
                f"weight {name} has infinities or NaN, which int4 cannot hold: copy the checkpoint again, or export it"
                " without --quantize"
            ) from None


def _added(files: WeightFiles, parameter: str, name: str, packed: PackedInt4) -> dict[str, str]:
    prefix = "" if parameter == "weight" else f"{parameter}_"
    return {
        parameter: files.add(name, packed.q),
        f"{prefix}scales": files.add(f"{name}_scales", packed.scales),
        f"{prefix}zeros": files.add(f"{name}_zeros", packed.zeros),
    }
