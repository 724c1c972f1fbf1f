"""What the runner on a GPU needs of a model."""

from typing import Protocol

import torch
from torch import Tensor

from deepseek_engine.cache_spec import Cache, CacheSpec
from deepseek_engine.gpu.device_step import DeviceStep
from deepseek_engine.models.config import ModelConfig


class DeviceModel(Protocol):
    """A model whose steps can be captured: it waits for nothing on the host, and keeps no tensor of a step.

    Attributes:
        dtype: of activations and cache.
        batch_invariant: whether a sequence's logits are the same bits whatever runs beside it.
    """

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    batch_invariant: bool

    @property
    def expands_keys(self) -> bool:
        """Whether `DeviceStep.prefill` has to hold the chunks in which prompts' keys are expanded."""
        ...

    @property
    def takes_whole_rows(self) -> bool:
        """Whether long rows are among the sequences of a `DeviceStep`, as short ones are, and none in its groups."""
        ...

    def outside_bytes(self) -> int:
        """Bytes of it on the device that torch's allocator does not know of, at their most so far."""
        ...

    def cache_spec(self) -> CacheSpec:
        """The planes of its cache."""
        ...

    def forward(self, step: DeviceStep, cache: Cache) -> Tensor:
        """Run the step's tokens, writing their cache entries; returns [T, hidden] after the final norm."""
        ...

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[N, hidden] after the final norm -> float32 [N, vocab], in `out` where it is given."""
        ...
