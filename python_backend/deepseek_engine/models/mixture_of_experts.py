"""DeepSeek's mixture-of-experts layer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepseek_engine.kernels import moe_gate
from deepseek_engine.kernels.linear import input_major, linear
from deepseek_engine.kernels.moe_experts import DenseExperts, moe_experts
from deepseek_engine.models.config import DeepseekConfig
from deepseek_engine.models.weights import Checkpoint


@dataclass(slots=True)
class MixtureOfExperts:
    """Routed experts chosen by a gate, and shared ones that every token runs."""

    config: DeepseekConfig
    gate: Tensor
    """float32 [hidden, E], whatever the model's dtype: the choice is made in float32."""
    bias: Tensor | None
    """float32 [E], e_score_correction_bias, of the noaux_tc gate."""
    gate_up: Tensor
    """[hidden, E + shared, 2 * I]."""
    down: Tensor
    """[E + shared, I, hidden]."""
    dense: DenseExperts | None
    """The same weights packed for few tokens, in a small model."""

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, config: DeepseekConfig) -> "MixtureOfExperts":
        experts, hidden = config.n_routed_experts, config.hidden_size
        bias = None
        if config.topk_method == "noaux_tc":
            bias = checkpoint.tensor(f"{prefix}.gate.e_score_correction_bias", experts, dtype=torch.float32)
        gate_up, down = _load_experts(checkpoint, prefix, config)
        return cls(
            config=config,
            gate=input_major(checkpoint.tensor(f"{prefix}.gate.weight", experts, hidden, dtype=torch.float32)),
            bias=bias,
            gate_up=gate_up,
            down=down,
            dense=DenseExperts.packed(gate_up, down, config.n_shared_experts, config.num_experts_per_tok),
        )

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        weights, experts = self.route(x)
        shared = self.config.n_shared_experts
        return moe_experts(x, residual, weights, experts, self.gate_up, self.down, shared, self.dense)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights float32 [T, top_k] and experts int64 [T, top_k]."""
        config = self.config
        logits = linear(x if x.dtype == torch.float32 else x.float(), self.gate)
        top_k, normalize, scaling = config.num_experts_per_tok, config.norm_topk_prob, config.routed_scaling_factor
        if config.topk_method == "greedy":
            return moe_gate.greedy(logits, top_k=top_k, normalize=normalize, scaling=scaling)
        groups, topk_groups = config.n_group, config.topk_group
        if self.bias is None:
            return moe_gate.group_limited_greedy(
                logits, top_k=top_k, groups=groups, topk_groups=topk_groups, normalize=normalize, scaling=scaling
            )
        return moe_gate.noaux_tc(
            logits, self.bias, top_k=top_k, groups=groups, topk_groups=topk_groups, normalize=normalize, scaling=scaling
        )


def _load_experts(checkpoint: Checkpoint, prefix: str, config: DeepseekConfig) -> tuple[Tensor, Tensor]:
    """One expert at a time into the stacks, so that loading needs no second copy of the layer."""
    routed, shared = config.n_routed_experts, config.n_shared_experts
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    dtype, device = checkpoint.dtype, checkpoint.device
    gate_up = torch.empty(hidden, routed + shared, 2, inner, dtype=dtype, device=device)
    down = torch.empty(routed + shared, inner, hidden, dtype=dtype, device=device)
    for expert in range(routed):
        name = f"{prefix}.experts.{expert}"
        gate_up[:, expert, 0] = checkpoint.tensor(f"{name}.gate_proj.weight", inner, hidden).t()
        gate_up[:, expert, 1] = checkpoint.tensor(f"{name}.up_proj.weight", inner, hidden).t()
        down[expert] = checkpoint.tensor(f"{name}.down_proj.weight", hidden, inner).t()
    if shared:
        name = f"{prefix}.shared_experts"
        width = shared * inner
        gate_up[:, routed:, 0] = (
            checkpoint.tensor(f"{name}.gate_proj.weight", width, hidden).t().unflatten(1, (shared, inner))
        )
        gate_up[:, routed:, 1] = (
            checkpoint.tensor(f"{name}.up_proj.weight", width, hidden).t().unflatten(1, (shared, inner))
        )
        down[routed:] = checkpoint.tensor(f"{name}.down_proj.weight", hidden, width).t().unflatten(0, (shared, inner))
    return gate_up.flatten(2), down
