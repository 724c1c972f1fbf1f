"""A step's numbers, packed so that one copy brings them to the device."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNMENT = 16
_NUMPY = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32}


class PackedInputs:
    """Named arrays on the host and the same on the device.

    The host side is written while the device still reads what was sent before: there are as many host copies as steps
    may be under way, and one more.

    Args:
        fields: name to dtype (int64, int32 or float32) and length.
        copies: host copies.
    """

    def __init__(self, fields: Mapping[str, tuple[torch.dtype, int]], device: torch.device, copies: int = 3) -> None:
        places: dict[str, tuple[torch.dtype, int, int]] = {}
        size = 0
        for name, (dtype, count) in fields.items():
            places[name] = dtype, size, count * dtype.itemsize
            size += -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        pinned = device.type == "cuda"
        self._hosts = [torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(copies)]
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._sent = [torch.cuda.Event() if pinned else None for _ in range(copies)]
        self._current = 0
        self._arrays = [
            {
                name: host[start : start + count].numpy().view(_NUMPY[dtype])
                for name, (dtype, start, count) in places.items()
            }
            for host in self._hosts
        ]
        self.tensors: dict[str, Tensor] = {
            name: self._device[start : start + count].view(dtype) for name, (dtype, start, count) in places.items()
        }

    def begin(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays to fill next; waits for the device where it has not read them yet. They hold older numbers."""
        self._current = (self._current + 1) % len(self._hosts)
        event = self._sent[self._current]
        if event is not None:
            event.synchronize()
        return self._arrays[self._current]

    def send(self) -> None:
        """Copy what was filled, on the current stream."""
        self._device.copy_(self._hosts[self._current], non_blocking=True)
        event = self._sent[self._current]
        if event is not None:
            event.record()
