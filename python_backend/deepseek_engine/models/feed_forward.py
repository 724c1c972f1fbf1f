"""The dense feed-forward layer."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deepseek_engine.kernels.swiglu import swiglu
from deepseek_engine.models.weights import Checkpoint


@dataclass(slots=True)
class FeedForward:
    """down(silu(gate(x)) * up(x))."""

    gate_up: Tensor
    """[2 * I, hidden]: both projections as one product."""
    down: Tensor
    """[hidden, I]."""

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, hidden: int, intermediate: int) -> "FeedForward":
        gate = checkpoint.tensor(f"{prefix}.gate_proj.weight", intermediate, hidden)
        up = checkpoint.tensor(f"{prefix}.up_proj.weight", intermediate, hidden)
        down = checkpoint.tensor(f"{prefix}.down_proj.weight", hidden, intermediate)
        return cls(gate_up=torch.cat((gate, up)), down=down)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(swiglu(F.linear(x, self.gate_up)), self.down)
