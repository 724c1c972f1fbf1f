"""The dense feed-forward layer."""

from dataclasses import dataclass

from torch import Tensor

from deepseek_engine.kernels.linear import Weight, add_linear, input_major, linear, packed
from deepseek_engine.kernels.swiglu import swiglu
from deepseek_engine.models.weights import Checkpoint


@dataclass(slots=True)
class FeedForward:
    """residual + down(silu(gate(x)) * up(x))."""

    gate_up: Weight
    """[hidden, 2 * I]: both projections as one product."""
    down: Weight
    """[I, hidden]."""

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, hidden: int, intermediate: int) -> "FeedForward":
        gate = checkpoint.tensor(f"{prefix}.gate_proj.weight", intermediate, hidden)
        up = checkpoint.tensor(f"{prefix}.up_proj.weight", intermediate, hidden)
        down = checkpoint.tensor(f"{prefix}.down_proj.weight", hidden, intermediate)
        return cls(gate_up=packed(input_major(gate, up)), down=packed(input_major(down)))

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return add_linear(residual, swiglu(linear(x, self.gate_up)), self.down)
