import pytest
import torch
from device_kernels import DEVICE, DTYPES, ON_GPU, dtype_name, needs_device, random, relative_error
from torch import Tensor

pytest.importorskip("triton")
from deepseek_engine.kernels import moe_int4_triton as kernels
from deepseek_engine.kernels.int4_gemm import dequantized
from deepseek_engine.kernels.moe_int4_triton import PackedExperts
from deepseek_engine.kernels.swiglu import swiglu

pytestmark = needs_device
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def packed(count: int, outputs: int, depth: int, group_size: int, dtype: torch.dtype, seed: int) -> PackedExperts:
    generator = torch.Generator().manual_seed(seed)
    shape = (count, outputs, depth // group_size)
    q = torch.randint(0, 256, (count, outputs, depth // 2), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
    scales = (torch.rand(shape, generator=generator) + 0.5) / (5 * depth**0.5)
    return PackedExperts(q.to(DEVICE), scales.to(dtype).to(DEVICE), zeros.to(DEVICE))


def make(tokens: int, count: int, top_k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x of 128 columns, weights and experts."""
    generator = torch.Generator().manual_seed(tokens)
    experts = torch.rand(tokens, count, generator=generator).topk(top_k, dim=-1).indices.int()
    weights = torch.rand(tokens, top_k, generator=generator)
    return random(tokens, 128, dtype=dtype), weights.to(DEVICE), experts.to(DEVICE)


def exact(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: PackedExperts, down: PackedExperts, group_size: int
) -> Tensor:
    wide = [
        dequantized(each.q, each.scales, each.zeros, each.q.shape[2] * 2, group_size).double()
        for each in (gate_up, down)
    ]
    out = torch.zeros_like(x, dtype=torch.float64)
    for token, choices in enumerate(experts.tolist()):
        for rank, expert in enumerate(choices):
            if 0 <= expert < len(wide[0]):
                inner = swiglu(wide[0][expert] @ x[token].double())
                out[token] += weights[token, rank].double() * (wide[1][expert] @ inner)
    return out


@pytest.mark.parametrize("tokens", [1, 7, 50])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_experts_equal_their_sum(tokens: int, dtype: torch.dtype) -> None:
    case = make(tokens, 5, 2, dtype)
    stacks = packed(5, 128, 128, 32, dtype, 1), packed(5, 128, 64, 32, dtype, 2)
    out = kernels.moe_experts_int4(*case, *stacks, group_size=32)
    assert relative_error(out, exact(*case, *stacks, 32)) < TOLERANCE[dtype]


def test_choices_that_are_none_add_nothing() -> None:
    x, weights, experts = make(6, 4, 2, DTYPES[1])
    experts[0] = -1
    experts[3, 1] = 9
    stacks = packed(4, 128, 128, 64, DTYPES[1], 1), packed(4, 128, 64, 64, DTYPES[1], 2)
    out = kernels.moe_experts_int4(x, weights, experts, *stacks, group_size=64)
    assert (out[0] == 0).all()
    assert relative_error(out, exact(x, weights, experts, *stacks, 64)) < TOLERANCE[DTYPES[1]]


def test_groups_that_the_kernels_do_not_take_are_told() -> None:
    case = make(2, 4, 2, DTYPES[1])
    stacks = packed(4, 128, 128, 16, DTYPES[1], 1), packed(4, 128, 64, 16, DTYPES[1], 2)
    with pytest.raises(ValueError, match="whole blocks of 32 columns in groups of 32, 64 or 128"):
        kernels.moe_experts_int4(*case, *stacks, group_size=16)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="these kernels have no interpreter")
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("tokens", [1, 3, 17, 40, 90])
def test_experts_in_registers_and_in_tiles(tokens: int, group_size: int) -> None:
    """A load of 1 to 36 choices an expert, whose sizes are no whole tiles; some choices are none."""
    hidden, intermediate, count, top_k = 640, 384, 5, 2
    generator = torch.Generator().manual_seed(tokens)
    experts = torch.rand(tokens, count, generator=generator).topk(top_k, dim=-1).indices.int()
    experts[tokens // 2, 0] = -1
    weights = torch.rand(tokens, top_k, generator=generator)
    case = random(tokens, hidden, dtype=torch.bfloat16), weights.to(DEVICE), experts.to(DEVICE)
    stacks = (
        packed(count, 2 * intermediate, hidden, group_size, torch.bfloat16, 1),
        packed(count, hidden, intermediate, group_size, torch.bfloat16, 2),
    )
    out = kernels.moe_experts_int4(*case, *stacks, group_size=group_size)
    assert relative_error(out, exact(*case, *stacks, group_size)) < TOLERANCE[torch.bfloat16]
