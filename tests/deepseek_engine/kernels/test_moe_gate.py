"""The three gates against plain loops in float64."""

import pytest
import torch
from deepseek_engine.kernels import moe_gate
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

Chosen = list[dict[int, float]]


def chosen(weights: Tensor, experts: Tensor) -> Chosen:
    """A token's experts and their weights, in no order."""
    rows = zip(experts.tolist(), weights.tolist(), strict=True)
    return [dict(zip(ids, values, strict=True)) for ids, values in rows]


def best(scores: list[float], count: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda index: -scores[index])[:count]


def reference(
    scores: list[float], biased: list[float], group_best: int, top_k: int, groups: int, topk_groups: int
) -> dict[int, float]:
    """The top_k of the biased scores in the topk_groups groups whose group_best best sum highest."""
    size = len(scores) // groups
    sums = [sum(sorted(biased[g * size : (g + 1) * size])[-group_best:]) for g in range(groups)]
    eligible = [e for g in best(sums, topk_groups) for e in range(g * size, (g + 1) * size)]
    return {e: scores[e] for e in sorted(eligible, key=lambda e: -biased[e])[:top_k]}


def assert_chosen(found: Chosen, expected: Chosen, normalize: bool, scaling: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        total = sum(theirs.values()) if normalize else 1.0
        assert ours == pytest.approx({e: weight / total * scaling for e, weight in theirs.items()}, rel=1e-4)


gates = given(
    seed=st.integers(0, 2**31),
    groups=st.sampled_from([1, 2, 4]),
    topk_groups=st.integers(1, 4),
    top_k=st.integers(1, 4),
    normalize=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@gates
def test_noaux_tc(seed: int, groups: int, topk_groups: int, top_k: int, normalize: bool) -> None:
    topk_groups = min(topk_groups, groups)
    generator = torch.Generator().manual_seed(seed)
    logits, bias = torch.randn(5, 16, generator=generator) * 2, torch.randn(16, generator=generator)
    found = moe_gate.noaux_tc(
        logits, bias, top_k=top_k, groups=groups, topk_groups=topk_groups, normalize=normalize, scaling=2.5
    )
    scores = logits.double().sigmoid()
    expected = [
        reference(row, biased, 2, top_k, groups, topk_groups)
        for row, biased in zip(scores.tolist(), (scores + bias.double()).tolist(), strict=True)
    ]
    assert_chosen(chosen(*found), expected, normalize, 2.5)


@settings(max_examples=60, deadline=None)
@gates
def test_group_limited_greedy(seed: int, groups: int, topk_groups: int, top_k: int, normalize: bool) -> None:
    topk_groups = min(topk_groups, groups)
    logits = torch.randn(5, 16, generator=torch.Generator().manual_seed(seed)) * 2
    found = moe_gate.group_limited_greedy(
        logits, top_k=top_k, groups=groups, topk_groups=topk_groups, normalize=normalize, scaling=16.0
    )
    scores = logits.double().softmax(-1).tolist()
    expected = [reference(row, row, 1, top_k, groups, topk_groups) for row in scores]
    assert_chosen(chosen(*found), expected, normalize, 16.0)


@pytest.mark.parametrize("normalize", [False, True])
def test_greedy(normalize: bool) -> None:
    logits = torch.randn(9, 16)
    found = moe_gate.greedy(logits, top_k=3, normalize=normalize, scaling=1.5)
    scores = logits.double().softmax(-1).tolist()
    assert_chosen(chosen(*found), [reference(row, row, 1, 3, 1, 1) for row in scores], normalize, 1.5)


def test_negative_biased_scores_stay_within_their_groups() -> None:
    """Masked with 0, the other group's experts would win over these."""
    bias = torch.tensor([-1.5, -1.5, -9.0, -9.0])
    gate = {"top_k": 2, "groups": 2, "topk_groups": 1, "normalize": False, "scaling": 1.0}
    _, experts = moe_gate.noaux_tc(torch.zeros(1, 4), bias, **gate)
    assert sorted(experts[0].tolist()) == [0, 1]


def test_scores_that_underflow_give_no_nan() -> None:
    gate = {"top_k": 2, "groups": 1, "topk_groups": 1, "normalize": True, "scaling": 1.0}
    weights, _ = moe_gate.noaux_tc(torch.full((1, 4), -200.0), torch.zeros(4), **gate)
    assert torch.equal(weights, torch.zeros(1, 2))
