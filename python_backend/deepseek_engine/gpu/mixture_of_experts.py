"""DeepSeek's mixture-of-experts layer on a GPU."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepseek_engine.gpu.device_step import DeviceStep
from deepseek_engine.kernels.moe_gate_triton import moe_gate
from deepseek_engine.kernels.moe_triton import moe_experts
from deepseek_engine.models.config import DeepseekConfig
from deepseek_engine.models.weights import Checkpoint


@dataclass(slots=True)
class MixtureOfExperts:
    """Routed experts chosen by a gate; shared ones stand after them and are chosen by every token with weight 1."""

    config: DeepseekConfig
    layer: int
    gate: Tensor
    """float32 [E, hidden]."""
    bias: Tensor | None
    """float32 [E], e_score_correction_bias, of the noaux_tc gate."""
    gate_up: Tensor
    """[E + shared, 2 * I, hidden]."""
    down: Tensor
    """[E + shared, hidden, I]."""
    fixed: bool = False
    """Whether tiles are to be the same for any number of tokens."""
    on_experts: Callable[[int, Tensor], None] | None = None
    """Called with the layer and its choices int32 [T, top_k + shared], when the layer runs outside of a graph."""

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, config: DeepseekConfig, layer: int) -> "MixtureOfExperts":
        experts, hidden = config.n_routed_experts, config.hidden_size
        bias = None
        if config.topk_method == "noaux_tc":
            bias = checkpoint.tensor(f"{prefix}.gate.e_score_correction_bias", experts, dtype=torch.float32)
        gate_up, down = _load_experts(checkpoint, prefix, config)
        return cls(
            config=config,
            layer=layer,
            gate=checkpoint.tensor(f"{prefix}.gate.weight", experts, hidden, dtype=torch.float32).contiguous(),
            bias=bias,
            gate_up=gate_up,
            down=down,
        )

    def fix(self) -> None:
        """Have each row's result depend on nothing else in the batch."""
        self.fixed = True

    def forward(self, x: Tensor, step: DeviceStep) -> Tensor:
        """x [T, hidden] -> a new [T, hidden]."""
        config = self.config
        weights, experts = moe_gate(
            x,
            self.gate,
            self.bias,
            method=config.topk_method,
            top_k=config.num_experts_per_tok,
            groups=config.n_group,
            topk_groups=config.topk_group,
            normalize=config.norm_topk_prob,
            scaling=config.routed_scaling_factor,
            shared=config.n_shared_experts,
            slots=step.slots,
            fixed=self.fixed,
        )
        if self.on_experts is not None:
            self.on_experts(self.layer, experts)
        return moe_experts(x, weights, experts, self.gate_up, self.down, fixed=self.fixed)


def _load_experts(checkpoint: Checkpoint, prefix: str, config: DeepseekConfig) -> tuple[Tensor, Tensor]:
    """One expert at a time into the stacks, so that loading needs no second copy of the layer."""
    routed, shared = config.n_routed_experts, config.n_shared_experts
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    dtype, device = checkpoint.dtype, checkpoint.device
    gate_up = torch.empty(routed + shared, 2, inner, hidden, dtype=dtype, device=device)
    down = torch.empty(routed + shared, hidden, inner, dtype=dtype, device=device)
    for expert in range(routed):
        name = f"{prefix}.experts.{expert}"
        gate_up[expert, 0].copy_(checkpoint.tensor(f"{name}.gate_proj.weight", inner, hidden))
        gate_up[expert, 1].copy_(checkpoint.tensor(f"{name}.up_proj.weight", inner, hidden))
        down[expert].copy_(checkpoint.tensor(f"{name}.down_proj.weight", hidden, inner))
    if shared:
        name, width = f"{prefix}.shared_experts", shared * inner
        for place, part in enumerate(("gate_proj", "up_proj")):
            weight = checkpoint.tensor(f"{name}.{part}.weight", width, hidden)
            gate_up[routed:, place].copy_(weight.view(shared, inner, hidden))
        weight = checkpoint.tensor(f"{name}.down_proj.weight", hidden, width)
        down[routed:].copy_(weight.view(hidden, shared, inner).transpose(0, 1))
    return gate_up.flatten(1, 2), down
