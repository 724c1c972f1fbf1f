import pytest
import torch
from device_kernels import DEVICE, DTYPES, TOLERANCE, dtype_name, needs_device, random, relative_error

pytest.importorskip("triton")
from deepseek_engine.kernels import rope
from deepseek_engine.kernels import rope_cache_triton as kernels
from deepseek_engine.kernels.rms_norm import rms_norm
from torch import Tensor

pytestmark = needs_device
SHAPES = [(1, 1, 16, 32), (5, 16, 64, 512), (3, 33, 64, 512), (4, 128, 64, 512), (2, 4, 16, 96)]
"""tokens, heads, rotary width, latent width."""


def make(shape: tuple[int, int, int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    tokens, heads, rotary, rank = shape
    inv_freq = 1.0 / 10000.0 ** (torch.arange(0, rotary, 2, device=DEVICE) / rotary)
    return {
        "q": random(tokens, heads, 128 + rotary, dtype=dtype),
        "latent": random(tokens, rank + rotary, dtype=dtype, seed=1),
        "weight": random(rank, dtype=dtype, seed=2),
        "inv_freq": inv_freq,
        "table": rope.rope_table(inv_freq, 0.75, 4096),
        "positions": torch.arange(tokens, device=DEVICE) * 777,
        "slots": (torch.arange(tokens, device=DEVICE) * 5 + 3) % 64,
        "plane": torch.full((64, rank + rotary), 7.0, dtype=dtype, device=DEVICE),
    }


def exact_rotation(x: Tensor, inv_freq: Tensor, positions: Tensor, *, interleaved: bool) -> Tensor:
    rotation = rope.rotations(positions, inv_freq, 0.75).to(torch.complex128)
    wide = x.double() if interleaved else x.double()[..., rope.interleaving(x.shape[-1]).to(x.device)]
    turned = torch.view_as_real(torch.view_as_complex(wide.unflatten(-1, (-1, 2)).contiguous()) * rotation)
    return turned.flatten(-2) if interleaved else torch.cat((turned[..., 0], turned[..., 1]), dim=-1)


@pytest.mark.parametrize("interleaved", [True, False], ids=["pairs", "halves"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_queries_turn_and_the_latent_is_written(
    shape: tuple[int, int, int, int], dtype: torch.dtype, interleaved: bool
) -> None:
    case = make(shape, dtype)
    rank, before = shape[3], case["q"].clone()
    exact_q = exact_rotation(before[..., 128:], case["inv_freq"], case["positions"], interleaved=interleaved)
    exact_k = exact_rotation(
        case["latent"][:, None, rank:], case["inv_freq"], case["positions"], interleaved=interleaved
    )
    exact_c = rms_norm(case["latent"][:, :rank].double(), case["weight"].double(), 1e-6)
    q_pe = case["q"][..., 128:]
    kernels.rope_cache(
        q_pe,
        case["latent"],
        case["weight"],
        1e-6,
        case["table"],
        case["positions"],
        case["slots"],
        case["plane"],
        interleaved=interleaved,
    )
    entries = case["plane"][case["slots"]]
    assert relative_error(q_pe, exact_q) < TOLERANCE[dtype]
    assert relative_error(entries[:, rank:], exact_k[:, 0]) < TOLERANCE[dtype]
    assert relative_error(entries[:, :rank], exact_c) < TOLERANCE[dtype]
    torch.testing.assert_close(case["q"][..., :128], before[..., :128], rtol=0, atol=0)
    others = torch.ones(64, dtype=torch.bool, device=DEVICE).index_fill_(0, case["slots"], False)
    assert (case["plane"][others] == 7.0).all()


def test_a_padded_row_writes_nothing() -> None:
    case = make((3, 4, 16, 32), DTYPES[1])
    case["slots"][1] = -1
    kernels.rope_cache(
        case["q"][..., 128:],
        case["latent"],
        case["weight"],
        1e-6,
        case["table"],
        case["positions"],
        case["slots"],
        case["plane"],
    )
    written = (case["plane"] != 7.0).any(-1).nonzero().flatten().tolist()
    assert written == sorted(case["slots"][[0, 2]].tolist())


def test_another_output_leaves_the_queries() -> None:
    case = make((2, 16, 64, 512), DTYPES[1])
    q_pe, before = case["q"][..., 128:], case["q"].clone()
    arguments = [case[name] for name in ("latent", "weight")]
    tail = [case[name] for name in ("table", "positions", "slots", "plane")]
    out = torch.empty(2, 16, 64, dtype=q_pe.dtype, device=DEVICE)
    kernels.rope_cache(q_pe, *arguments, 1e-6, *tail, out=out)
    torch.testing.assert_close(case["q"], before, rtol=0, atol=0)
    torch.testing.assert_close(out, kernels.rope_cache(q_pe, *arguments, 1e-6, *tail), rtol=0, atol=0)
