"""The experts of a mixture-of-experts layer, routed and shared."""

import torch
import torch.nn.functional as F
from torch import Tensor

from deepseek_engine.kernels.swiglu import swiglu

LOOP_COST = 256 * 1024
"""Bytes of weights that a CPU core reads in the time that one more expert costs in operator calls, about 15 us."""
DENSE_TOKENS = 16
"""With more tokens the products are bound by arithmetic, and running experts that nobody chose is no longer free."""


def moe_experts(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, shared: int) -> Tensor:
    """sum_k weights[t, k] * f(e, x[t]) with e = experts[t, k], plus f(s, x[t]) for every shared expert s.

    f(e, x) = down[e]^T swiglu(gate_up[e] x) (DeepSeekMoE, arXiv:2401.06066). x [T, hidden]; weights [T, top_k] and
    experts int64 [T, top_k] from the gate; gate_up [E + shared, 2 * I, hidden], an expert's gate rows before its up
    rows; down [E + shared, I, hidden]. The last `shared` experts are the shared ones: one MLP of shared * I is the sum
    of that many of I. Returns [T, hidden] in x's dtype.
    """
    routed = gate_up.shape[0] - shared
    expert_bytes = 3 * down.shape[1] * down.shape[2] * down.element_size()
    touched = min(routed, experts.numel())
    if x.shape[0] <= DENSE_TOKENS and (routed - touched) * expert_bytes <= touched * LOOP_COST:
        return dense_experts(x, weights, experts, gate_up, down, shared)
    return grouped_experts(x, weights, experts, gate_up, down, shared)


def dense_experts(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, shared: int) -> Tensor:
    """moe_experts by running all experts as two products, those not chosen with weight 0: for few tokens."""
    count, intermediate, hidden = down.shape
    mix = x.new_zeros(x.shape[0], count).scatter_(-1, experts, weights.to(x.dtype))
    if shared:
        mix[:, count - shared :] = 1.0
    inner = swiglu(F.linear(x, gate_up.flatten(0, 1)).unflatten(-1, (count, 2 * intermediate)))
    return (inner * mix.unsqueeze(-1)).flatten(1) @ down.view(count * intermediate, hidden)


def grouped_experts(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, shared: int) -> Tensor:
    """moe_experts by sorting the choices by expert and running each chosen expert once: reads no weight in vain."""
    top_k = experts.shape[1]
    routed = gate_up.shape[0] - shared
    order = experts.flatten().argsort(stable=True)
    counts = torch.bincount(experts.flatten(), minlength=routed).tolist()
    sorted_x = x.index_select(0, order // top_k)
    projected = x.new_empty(order.shape[0], gate_up.shape[1])
    for expert, rows in _spans(counts):
        torch.mm(sorted_x[rows], gate_up[expert].t(), out=projected[rows])
    inner = swiglu(projected) * weights.flatten().index_select(0, order).to(x.dtype).unsqueeze(-1)
    outputs = torch.empty_like(sorted_x)
    for expert, rows in _spans(counts):
        torch.mm(inner[rows], down[expert], out=outputs[rows])
    total = torch.empty_like(outputs).index_copy_(0, order, outputs).unflatten(0, (-1, top_k)).sum(1)
    return total + _shared_experts(x, gate_up[routed:], down[routed:]) if shared else total


def _spans(counts: list[int]) -> list[tuple[int, slice]]:
    spans = []
    start = 0
    for expert, count in enumerate(counts):
        if count:
            spans.append((expert, slice(start, start + count)))
        start += count
    return spans


def _shared_experts(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    shared, intermediate, hidden = down.shape
    inner = swiglu(F.linear(x, gate_up.flatten(0, 1)).unflatten(-1, (shared, 2 * intermediate)))
    return inner.flatten(1) @ down.reshape(shared * intermediate, hidden)
