"""The experts of a mixture-of-experts layer, routed and shared."""

from functools import lru_cache

import torch
from torch import Tensor

from deepseek_engine.kernels.linear import linear
from deepseek_engine.kernels.swiglu import swiglu

LOOP_COST = 512 * 1024
"""Bytes of weights that a CPU core reads in the time that one more expert costs in operator calls, about 30 us."""
DENSE_TOKENS = 16
"""With more tokens the products are bound by arithmetic, and running experts that nobody chose is no longer free."""


def moe_experts(
    x: Tensor, residual: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, shared: int
) -> Tensor:
    """residual + sum_k weights[t, k] * f(e, x[t]) with e = experts[t, k], plus f(s, x[t]) for every shared expert s.

    f(e, x) = down[e]^T swiglu(gate_up[:, e]^T x) (DeepSeekMoE, arXiv:2401.06066). x and residual [T, hidden]; weights
    [T, top_k] and experts int64 [T, top_k] from the gate; gate_up [hidden, E + shared, 2 * I], an expert's gate columns
    before its up columns; down [E + shared, I, hidden]. The last `shared` experts are the shared ones: one MLP of
    shared * I is the sum of that many of I. Returns [T, hidden] in x's dtype.
    """
    routed = down.shape[0] - shared
    expert_bytes = 3 * down.shape[1] * down.shape[2] * down.element_size()
    touched = min(routed, experts.numel())
    if x.shape[0] <= DENSE_TOKENS and (routed - touched) * expert_bytes <= touched * LOOP_COST:
        return dense_experts(x, residual, weights, experts, gate_up, down, shared)
    return grouped_experts(x, residual, weights, experts, gate_up, down, shared)


def dense_experts(
    x: Tensor, residual: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, shared: int
) -> Tensor:
    """moe_experts by running all experts as two products, those not chosen with weight 0: for few tokens."""
    tokens, (count, intermediate, hidden) = x.shape[0], down.shape
    mix = _shared_mix(count, shared, x.dtype, x.device).expand(tokens, -1).scatter(1, experts, weights.to(x.dtype))
    inner = swiglu(linear(x, gate_up.view(hidden, -1)).view(tokens, count, 2 * intermediate))
    inner.mul_(mix.unsqueeze(-1))
    return torch.addmm(residual, inner.view(tokens, -1), down.view(-1, hidden))


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
    total = torch.empty_like(outputs).index_copy_(0, order, outputs).view(-1, top_k, x.shape[1]).sum(1).add_(residual)
    return _add_shared(total, x, gate_up[:, routed:].flatten(1), down[routed:]) if shared else total


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
