"""What a model keeps for each token, and how much room that takes."""

from dataclasses import dataclass

import torch
from torch import Tensor

Cache = dict[str, Tensor]
"""Plane name to Tensor [layers, num_blocks * block_size, width]."""

LayerCache = dict[str, Tensor]
"""Plane name to one layer's Tensor [num_blocks * block_size, width]."""


@dataclass(frozen=True, slots=True)
class CachePlane:
    """One array of the cache."""

    name: str
    layers: int
    width: int
    """Elements a token and layer."""
    dtype: torch.dtype
    alignment: int = 1
    """Bytes; a token's entry is a multiple of it."""

    def __post_init__(self) -> None:
        if (self.width * self.dtype.itemsize) % self.alignment:
            raise ValueError(
                f"cache plane {self.name}: {self.width} elements of {self.dtype} are no multiple of"
                f" {self.alignment} bytes; pad the width"
            )

    @property
    def bytes_per_token(self) -> int:
        return self.layers * self.width * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The planes that a model and a cache format need, all addressed by one block table."""

    planes: tuple[CachePlane, ...]

    @property
    def bytes_per_token(self) -> int:
        return sum(plane.bytes_per_token for plane in self.planes)

    def num_blocks(self, memory: int, block_size: int) -> int:
        """How many whole blocks fit in `memory` bytes."""
        return memory // (self.bytes_per_token * block_size)

    def allocate(self, num_blocks: int, block_size: int, device: torch.device | str = "cpu") -> Cache:
        """Zeroed planes for num_blocks * block_size slots."""
        slots = num_blocks * block_size
        return {
            plane.name: torch.zeros(plane.layers, slots, plane.width, dtype=plane.dtype, device=device)
            for plane in self.planes
        }
