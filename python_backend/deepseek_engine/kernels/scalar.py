"""Constants as tensors."""

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=64)
def scalar(value: float, device: torch.device) -> Tensor:
    """A float32 tensor of no dimensions, made once: torch makes one of every Python number, at every call."""
    return torch.tensor(value, dtype=torch.float32, device=device)
