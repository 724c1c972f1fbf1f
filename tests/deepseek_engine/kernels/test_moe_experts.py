"""Experts against a loop in float64, both ways of running them."""

import pytest
import torch
from deepseek_engine.kernels import moe_experts as kernel
from torch import Tensor


def problem(tokens: int, routed: int, shared: int, top_k: int, hidden: int, inner: int) -> tuple[Tensor, ...]:
    torch.manual_seed(tokens * 100 + routed)
    experts = torch.stack([torch.randperm(routed)[:top_k] for _ in range(tokens)])
    gate_up = torch.randn(hidden, routed + shared, 2 * inner) / hidden**0.5
    down = torch.randn(routed + shared, inner, hidden) / inner**0.5
    return torch.randn(tokens, hidden), torch.randn(tokens, hidden), torch.rand(tokens, top_k), experts, gate_up, down


def exact(
    x: Tensor, residual: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, shared: int
) -> Tensor:
    x, total, weights, gate_up, down = (each.double() for each in (x, residual.clone(), weights, gate_up, down))
    count = down.shape[0]
    for token in range(x.shape[0]):
        chosen = [*zip(experts[token].tolist(), weights[token], strict=True)]
        for expert, weight in [*chosen, *((expert, 1.0) for expert in range(count - shared, count))]:
            gate, up = (x[token] @ gate_up[:, expert]).chunk(2)
            total[token] += weight * ((gate * gate.sigmoid() * up) @ down[expert])
    return total


@pytest.mark.parametrize("run", [kernel.dense_experts, kernel.grouped_experts, kernel.moe_experts])
@pytest.mark.parametrize("shared", [0, 1, 2])
@pytest.mark.parametrize(("tokens", "routed", "top_k"), [(1, 16, 4), (3, 5, 1), (8, 16, 6), (40, 7, 3)])
def test_float64(run, tokens: int, routed: int, top_k: int, shared: int) -> None:
    case = problem(tokens, routed, shared, top_k, hidden=24, inner=10)
    torch.testing.assert_close(run(*case, shared).double(), exact(*case, shared), rtol=1e-5, atol=1e-5)


def test_inputs_are_left_alone() -> None:
    case = problem(3, 8, 1, 2, hidden=16, inner=8)
    before = [each.clone() for each in case]
    kernel.dense_experts(*case, 1)
    kernel.grouped_experts(*case, 1)
    assert all(torch.equal(each, copy) for each, copy in zip(case, before, strict=True))
