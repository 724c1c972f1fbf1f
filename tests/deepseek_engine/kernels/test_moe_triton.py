import pytest
import torch
from device_kernels import DEVICE, DTYPES, dtype_name, needs_device, random, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")
from deepseek_engine.kernels import moe_triton as kernels

pytestmark = needs_device
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def make(
    tokens: int, count: int, top_k: int, hidden: int, inner: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, count, generator=generator)
    experts = scores.topk(top_k, dim=-1).indices.to(torch.int32).to(DEVICE)
    return (
        random(tokens, hidden, dtype=dtype, seed=seed),
        torch.rand(tokens, top_k, generator=generator).to(DEVICE),
        experts,
        random(count, 2 * inner, hidden, dtype=dtype, scale=hidden**-0.5, seed=seed + 1),
        random(count, hidden, inner, dtype=dtype, scale=inner**-0.5, seed=seed + 2),
    )


def exact_experts(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    x, weights = x.double(), weights.double()
    out = torch.zeros_like(x)
    for token, choices in enumerate(experts.tolist()):
        for rank, expert in enumerate(choices):
            if 0 <= expert < gate_up.shape[0]:
                gate, up = (gate_up[expert].double() @ x[token]).chunk(2)
                out[token] += weights[token, rank] * (down[expert].double() @ (torch.nn.functional.silu(gate) * up))
    return out


@pytest.mark.parametrize("tokens", [2, 19])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_experts_equal_their_sum(tokens: int, dtype: torch.dtype) -> None:
    case = make(tokens, 10, 4, 80, 48, dtype)
    assert relative_error(kernels.moe_experts(*case), exact_experts(*case)) < TOLERANCE[dtype]


@pytest.mark.parametrize("tiling", kernels.TILINGS, ids=lambda tiling: tiling.name)
def test_every_tiling(tiling: kernels.Tiling) -> None:
    if DEVICE.type == "cuda" and 90 not in tiling.architectures:
        pytest.skip("declared for another architecture")
    case = make(40, 4, 2, 144, 80, DTYPES[1])
    assert relative_error(kernels.moe_experts(*case, tiling=tiling), exact_experts(*case)) < TOLERANCE[DTYPES[1]]


@pytest.mark.parametrize("tokens", [1, 7])
def test_experts_that_are_not_local_are_skipped(tokens: int) -> None:
    x, weights, experts, gate_up, down = make(tokens, 6, 3, 64, 48, DTYPES[1])
    experts[0, 1] = -1
    experts[-1, 2] = 9
    out = kernels.moe_experts(x, weights, experts, gate_up, down)
    assert relative_error(out, exact_experts(x, weights, experts, gate_up, down)) < TOLERANCE[DTYPES[1]]


@pytest.mark.parametrize("tokens", [1, 7])
def test_a_token_without_local_experts_gets_zero(tokens: int) -> None:
    x, weights, experts, gate_up, down = make(tokens, 6, 3, 64, 48, DTYPES[1])
    experts[-1] = -1
    out = kernels.moe_experts(x, weights, experts, gate_up, down)
    assert (out[-1] == 0).all()


def test_a_token_does_not_depend_on_the_others() -> None:
    x, weights, experts, gate_up, down = make(11, 6, 3, 64, 48, DTYPES[1])
    tiling = kernels.TILINGS[0]
    together = kernels.moe_experts(x, weights, experts, gate_up, down, tiling=tiling)
    # The choices' address has to be a multiple of 16 bytes, as that of a tensor of its own is.
    alone = kernels.moe_experts(x[9:10], weights[9:10], experts[9:10].clone(), gate_up, down, tiling=tiling)
    torch.testing.assert_close(together[9:10], alone, rtol=0, atol=0)


def test_rows_of_a_wider_tensor() -> None:
    x, *rest = make(5, 6, 3, 64, 48, DTYPES[1])
    wide = torch.cat((x, x.new_full((5, 64), float("nan"))), dim=-1)
    torch.testing.assert_close(kernels.moe_experts(wide[:, :64], *rest), kernels.moe_experts(x, *rest), rtol=0, atol=0)


@settings(deadline=None, max_examples=8)
@given(
    choices=st.lists(st.lists(st.integers(-2, 6), min_size=3, max_size=3), min_size=1, max_size=60),
    rows=st.sampled_from((16, 32)),
)
def test_sorting_keeps_every_local_choice_once_in_its_experts_tiles(choices: list[list[int]], rows: int) -> None:
    experts = torch.tensor(choices, dtype=torch.int32, device=DEVICE)
    pairs, count = experts.numel(), 6
    sizes = kernels.PLAN.workspace_bytes(
        {"pairs": pairs, "experts": count, "hidden": 1, "intermediate": 1, "element_bytes": 1}, {"BLOCK_M": rows}
    )
    places = torch.full((sizes["sorted"] // 4,), -7, dtype=torch.int32, device=DEVICE)
    tile_experts = torch.full((sizes["tile_experts"] // 4,), -7, dtype=torch.int32, device=DEVICE)
    tiles = torch.full((1,), -7, dtype=torch.int32, device=DEVICE)
    dims = {"pairs": pairs, "experts": count, "block_m": rows}
    row = kernels.require(kernels.SORT, torch.empty(0, dtype=DTYPES[1], device=DEVICE), dims)
    arguments = {"experts_ptr": experts, "sorted_ptr": places, "tile_experts_ptr": tile_experts, "tiles_ptr": tiles}
    kernels.launcher.launch(
        kernels.SORT.kernel,
        row,
        kernels.PLAN.steps[0].blocks(dims, row),
        arguments | {"pairs": pairs, "experts": count},
    )
    found: list[int] = []
    for tile in range(int(tiles)):
        own = [pair for pair in places[tile * rows : (tile + 1) * rows].tolist() if pair != -1]
        assert own == sorted(own)
        assert {int(experts.flatten()[pair]) for pair in own} == {int(tile_experts[tile])}
        found += own
    local = [pair for pair, expert in enumerate(experts.flatten().tolist()) if 0 <= expert < count]
    assert sorted(found) == local


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 32, 300])
def test_no_worse_than_torch_in_bfloat16(tokens: int) -> None:
    x, weights, experts, gate_up, down = make(tokens, 64, 6, 2048, 1408, torch.bfloat16)
    out = kernels.moe_experts(x, weights, experts, gate_up, down)[-8:]
    x, weights, experts = x[-8:], weights[-8:], experts[-8:]
    exact = exact_experts(x, weights, experts, gate_up, down)
    plain = torch.zeros_like(x)
    for token, choices in enumerate(experts.tolist()):
        for rank, expert in enumerate(choices):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            product = down[expert] @ (torch.nn.functional.silu(gate) * up)
            plain[token] += weights[token, rank].to(x.dtype) * product
    assert relative_error(out, exact) <= 1.5 * relative_error(plain, exact)
