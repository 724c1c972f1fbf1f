"""The dense feed-forward layer on a GPU."""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepseek_engine.gpu.device_step import DeviceStep
from deepseek_engine.gpu.product import Product
from deepseek_engine.kernels.small_gemm_triton import Workspace
from deepseek_engine.models.weights import Checkpoint


@dataclass(slots=True)
class FeedForward:
    """down(silu(gate(x)) * up(x))."""

    gate_up: Product
    down: Product

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, prefix: str, hidden: int, intermediate: int, workspace: Workspace
    ) -> "FeedForward":
        gate = checkpoint.tensor(f"{prefix}.gate_proj.weight", intermediate, hidden)
        up = checkpoint.tensor(f"{prefix}.up_proj.weight", intermediate, hidden)
        down = checkpoint.tensor(f"{prefix}.down_proj.weight", hidden, intermediate)
        return cls(Product(torch.cat((gate, up)), workspace), Product(down, workspace))

    def fix(self) -> None:
        """Have each row's result depend on nothing else in the batch."""
        self.gate_up.fixed = self.down.fixed = True

    def forward(self, x: Tensor, step: DeviceStep) -> Tensor:
        """x [T, hidden] -> a new [T, hidden]."""
        return self.down(self.gate_up.gated(x))
