"""The dense feed-forward layer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepseek_engine.kernels.linear import input_major, linear
from deepseek_engine.kernels.swiglu import swiglu
from deepseek_engine.models.weights import Checkpoint


@dataclass(slots=True)
class FeedForward:
    """residual + down(silu(gate(x)) * up(x))."""

    gate_up: Tensor
    """[hidden, 2 * I]: both projections as one product."""
    down: Tensor
    """[I, hidden]."""

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, hidden: int, intermediate: int) -> "FeedForward":
        gate = checkpoint.tensor(f"{prefix}.gate_proj.weight", intermediate, hidden)
        up = checkpoint.tensor(f"{prefix}.up_proj.weight", intermediate, hidden)
        down = checkpoint.tensor(f"{prefix}.down_proj.weight", hidden, intermediate)
        return cls(gate_up=input_major(gate, up), down=input_major(down))

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return torch.addmm(residual, swiglu(linear(x, self.gate_up)), self.down)
