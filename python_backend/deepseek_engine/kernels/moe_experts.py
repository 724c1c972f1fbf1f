"""The experts of a mixture-of-experts layer, routed and shared."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from deepseek_engine.kernels.half_weight import HalfWeight
from deepseek_engine.kernels.linear import Weight, add_linear, linear
from deepseek_engine.kernels.swiglu import swiglu

LOOP_COST = 512 * 1024
"""Bytes of weights that a CPU core reads in the time that one more expert costs in operator calls, about 30 us."""
DENSE_TOKENS = 16
"""With more tokens the products are bound by arithmetic, and running experts that nobody chose is no longer free."""
PACKED_TOKENS = 48
"""The same for packed weights, which few tokens are done with sooner."""


@dataclass(frozen=True, slots=True)
class DenseExperts:
    """All experts of a layer as two products, those not chosen with weight 0: for few tokens."""

    gate_up: Weight
    """[hidden, (E + shared) * 2 * I]."""
    down: Weight
    """[(E + shared) * I, hidden]."""
    count: int
    """E + shared."""
    shared: int

    @classmethod
    def packed(cls, gate_up: Tensor, down: Tensor, shared: int, top_k: int) -> "DenseExperts | None":
        """A packed copy of moe_experts' weights, which stay for many tokens.

        None where running all experts does not pay for a single token, or the weights do not pack.
        """
        if not _dense_pays(down, shared, top_k):
            return None
        inputs, outputs = HalfWeight.of(gate_up.flatten(1)), HalfWeight.of(down.flatten(0, 1))
        return None if inputs is None or outputs is None else cls(inputs, outputs, down.shape[0], shared)

    def forward(self, x: Tensor, residual: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """As moe_experts."""
        tokens = x.shape[0]
        mix = _shared_mix(self.count, self.shared, x.dtype, x.device).expand(tokens, -1)
        mix = mix.scatter(1, experts, weights.to(x.dtype))
        inner = swiglu(linear(x, self.gate_up).view(tokens, self.count, -1)).mul_(mix.unsqueeze(-1))
        return add_linear(residual, inner.view(tokens, -1), self.down)


def moe_experts(
    x: Tensor,
    residual: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    shared: int,
    dense: DenseExperts | None = None,
) -> Tensor:
    """residual + sum_k weights[t, k] * f(e, x[t]) with e = experts[t, k], plus f(s, x[t]) for every shared expert s.

    f(e, x) = down[e]^T swiglu(gate_up[:, e]^T x) (DeepSeekMoE, arXiv:2401.06066). x and residual [T, hidden]; weights
    [T, top_k] and experts int64 [T, top_k] from the gate; gate_up [hidden, E + shared, 2 * I], an expert's gate columns
    before its up columns; down [E + shared, I, hidden]. The last `shared` experts are the shared ones: one MLP of
    shared * I is the sum of that many of I. `dense` is the same experts packed. Returns [T, hidden] in x's dtype.
    """
    if dense is not None and x.shape[0] <= PACKED_TOKENS:
        return dense.forward(x, residual, weights, experts)
    if x.shape[0] <= DENSE_TOKENS and _dense_pays(down, shared, experts.numel()):
        return dense_experts(x, residual, weights, experts, gate_up, down, shared)
    return grouped_experts(x, residual, weights, experts, gate_up, down, shared)


def dense_experts(
    x: Tensor, residual: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, shared: int
) -> Tensor:
    """moe_experts by running all experts."""
    dense = DenseExperts(gate_up.flatten(1), down.flatten(0, 1), down.shape[0], shared)
    return dense.forward(x, residual, weights, experts)


def grouped_experts(
    x: Tensor, residual: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, shared: int
) -> Tensor:
    """moe_experts by sorting the choices by expert and running each chosen expert once: reads no weight in vain."""
    top_k = experts.shape[1]
    routed = down.shape[0] - shared
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    spans = _spans(torch.bincount(flat, minlength=routed).tolist())
    sorted_x = x.index_select(0, order // top_k)
    projected = x.new_empty(order.shape[0], gate_up.shape[2])
    for expert, rows in spans:
        torch.mm(sorted_x[rows], gate_up[:, expert], out=projected[rows])
    inner = swiglu(projected).mul_(weights.flatten().index_select(0, order).to(x.dtype).unsqueeze(-1))
    outputs = torch.empty_like(sorted_x)
    for expert, rows in spans:
        torch.mm(inner[rows], down[expert], out=outputs[rows])
    places = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    total = outputs.index_select(0, places).view(-1, top_k, x.shape[1]).sum(1).add_(residual)
    return _add_shared(total, x, gate_up[:, routed:].flatten(1), down[routed:]) if shared else total


def _dense_pays(down: Tensor, shared: int, choices: int) -> bool:
    """Whether reading the experts that nobody chose takes less time than the operator calls for those chosen."""
    routed = down.shape[0] - shared
    expert_bytes = 3 * down.shape[1] * down.shape[2] * down.element_size()
    touched = min(routed, choices)
    return (routed - touched) * expert_bytes <= touched * LOOP_COST


@lru_cache(maxsize=16)
def _shared_mix(count: int, shared: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[1, count]: 0 for routed experts, 1 for shared ones."""
    return (torch.arange(count, device=device) >= count - shared).to(dtype).unsqueeze(0)


def _spans(counts: list[int]) -> list[tuple[int, slice]]:
    spans = []
    start = 0
    for expert, count in enumerate(counts):
        if count:
            spans.append((expert, slice(start, start + count)))
        start += count
    return spans


def _add_shared(total: Tensor, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    shared, intermediate, hidden = down.shape
    inner = swiglu(linear(x, gate_up).view(-1, shared, 2 * intermediate))
    return torch.addmm(total, inner.view(-1, shared * intermediate), down.view(-1, hidden))
