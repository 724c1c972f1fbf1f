import pytest
import torch
from device_kernels import DEVICE, DTYPES, needs_device, random
from torch import Tensor

pytest.importorskip("triton")
from deepseek_engine.kernels import moe_gate as reference
from deepseek_engine.kernels import moe_gate_triton as kernels

pytestmark = needs_device

GATES = {
    "v2_lite": {"method": "greedy", "experts": 64, "top_k": 6, "normalize": False, "scaling": 1.0},
    "v2": {
        "method": "group_limited_greedy",
        "experts": 160,
        "top_k": 6,
        "groups": 8,
        "topk_groups": 3,
        "normalize": False,
        "scaling": 16.0,
    },
    "v3": {
        "method": "noaux_tc",
        "experts": 256,
        "top_k": 8,
        "groups": 8,
        "topk_groups": 4,
        "normalize": True,
        "scaling": 2.5,
    },
    "small_v3": {
        "method": "noaux_tc",
        "experts": 16,
        "top_k": 4,
        "groups": 4,
        "topk_groups": 2,
        "normalize": True,
        "scaling": 2.5,
    },
    "normalised_greedy": {"method": "greedy", "experts": 20, "top_k": 3, "normalize": True, "scaling": 1.5},
}


def expected(logits: Tensor, bias: Tensor, gate: dict) -> tuple[Tensor, Tensor]:
    options = {key: gate[key] for key in ("top_k", "normalize", "scaling")}
    if gate["method"] == "greedy":
        return reference.greedy(logits, **options)
    options |= {key: gate[key] for key in ("groups", "topk_groups")}
    if gate["method"] == "group_limited_greedy":
        return reference.group_limited_greedy(logits, **options)
    return reference.noaux_tc(logits, bias, **options)


def dense(weights: Tensor, experts: Tensor, count: int) -> Tensor:
    return torch.zeros(weights.shape[0], count, device=DEVICE).scatter_(1, experts.long(), weights)


@pytest.mark.parametrize("name", GATES)
def test_the_gate_chooses_and_weighs_as_its_reference(name: str) -> None:
    gate = dict(GATES[name])
    count, hidden, tokens = gate.pop("experts"), 144, 2
    x = random(tokens, hidden, dtype=DTYPES[1])
    weight = random(count, hidden, scale=hidden**-0.5, seed=1)
    bias = random(count, scale=0.5, seed=2)
    weights, experts = kernels.moe_gate(x, weight, bias if gate["method"] == "noaux_tc" else None, **gate, shared=2)
    exact = expected((x.double() @ weight.double().t()).float(), bias, GATES[name])
    routed = weights[:, :-2], experts[:, :-2]
    torch.testing.assert_close(dense(*routed, count), dense(*exact, count), rtol=1e-4, atol=1e-6)
    assert (weights[:, -2:] == 1.0).all()
    assert experts[:, -2:].tolist() == [[count, count + 1]] * tokens


@pytest.mark.parametrize("row", kernels.GATE_LOGITS.variants, ids=lambda row: row.name)
def test_every_row_for_the_logits_agrees(row: kernels.Variant) -> None:
    x, weight = random(3, 144, dtype=DTYPES[1]), random(64, 144, scale=0.3, seed=4)
    weights, experts = kernels.moe_gate(
        x, weight, None, method="greedy", top_k=6, normalize=False, scaling=1.0, variant=row
    )
    exact = reference.greedy((x.double() @ weight.double().t()).float(), top_k=6, normalize=False, scaling=1.0)
    torch.testing.assert_close(dense(weights, experts, 64), dense(*exact, 64), rtol=1e-4, atol=1e-6)


def test_a_negative_bias_does_not_let_a_masked_group_in() -> None:
    x, weight = random(4, 64), random(16, 64, scale=0.1, seed=5)
    bias = torch.full((16,), -3.0, device=DEVICE)
    _, experts = kernels.moe_gate(
        x.to(DTYPES[1]),
        weight,
        bias,
        method="noaux_tc",
        top_k=4,
        groups=4,
        topk_groups=1,
        normalize=True,
        scaling=1.0,
    )
    assert all(len({expert // 4 for expert in row}) == 1 for row in experts.tolist())


def test_a_padded_row_chooses_no_expert_and_changes_no_other() -> None:
    x, weight = random(4, 64, dtype=DTYPES[1]), random(16, 64, scale=0.3, seed=6)
    options = {"method": "greedy", "top_k": 4, "normalize": False, "scaling": 1.0, "shared": 2}
    slots = torch.tensor([5, -1, 0, -1], device=DEVICE)
    weights, experts = kernels.moe_gate(x, weight, None, **options, slots=slots)
    plain_weights, plain_experts = kernels.moe_gate(x, weight, None, **options)
    assert (experts[1::2] == -1).all()
    assert torch.equal(experts[::2], plain_experts[::2])
    assert torch.equal(weights[::2], plain_weights[::2])


@pytest.mark.parametrize("name", ["v2", "v3", "normalised_greedy"])
def test_a_row_that_is_not_a_number_chooses_experts_that_exist(name: str) -> None:
    gate = dict(GATES[name])
    count = gate.pop("experts")
    x, weight = random(3, 64, dtype=DTYPES[1]), random(count, 64, scale=0.3, seed=7)
    bias = random(count, seed=8) if gate["method"] == "noaux_tc" else None
    sound = kernels.moe_gate(x, weight, bias, **gate)[1]
    x[1] = float("nan")
    _, experts = kernels.moe_gate(x, weight, bias, **gate)
    assert ((experts >= 0) & (experts < count)).all()
    assert torch.equal(experts[::2], sound[::2])
