"""What the decoder on a GPU needs to know of its layers' attention."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from deepseek_engine.cache_spec import LayerCache
from deepseek_engine.gpu.device_step import DeviceStep
from deepseek_engine.kernels.small_gemm_triton import Workspace
from deepseek_engine.models.weights import Checkpoint

P = TypeVar("P")
P_contra = TypeVar("P_contra", contravariant=True)


class Attention(Protocol[P_contra]):
    """One layer."""

    def fix(self) -> None:
        """Have each row's result depend on nothing else in the batch."""

    def forward(
        self, x: Tensor, step: DeviceStep, plan: P_contra | None, rotations: Tensor, planes: LayerCache
    ) -> Tensor:
        """Write the tokens' entries to the planes and attend to them.

        x [T, hidden], normalised; plan: how the first `step.num_decoded` tokens are decoded, where there are any;
        rotations as `rope_table` makes them. Returns a new [T, hidden].
        """


@dataclass(frozen=True, slots=True)
class AttentionKind(Generic[P]):
    """The attention of a model: what its layers share, and how one is loaded."""

    rotary_dim: int
    planes: Mapping[str, int]
    """Cache plane to its elements a token and layer."""
    expands: bool
    """Whether prompts attend to keys and values expanded from the cache, which groups of them have to fit; else they
    attend to the cache itself."""
    plan: Callable[[DeviceStep, int], P]
    """How every layer decodes a step. The number is the most tokens that a sequence can have, where its splits may
    depend on nothing else; else 0."""
    load: Callable[[Checkpoint, str, Workspace], Attention[P]]
    """The layer of a name prefix. Raises CheckpointError."""
