import pytest
import torch
from device_kernels import DEVICE, DTYPES, TOLERANCE, dtype_name, needs_device, random, relative_error

pytest.importorskip("triton")
from deepseek_engine.kernels import grouped_rope_triton as kernels
from deepseek_engine.kernels import rope
from deepseek_engine.kernels.rms_norm import rms_norm
from deepseek_engine.kernels.rope import rope_table
from torch import Tensor

pytestmark = needs_device
SHAPES = [(1, 1, 1, 64), (5, 32, 8, 128), (3, 12, 2, 128), (2, 16, 16, 64), (4, 20, 5, 96), (2, 5, 1, 80)]
"""tokens, query heads, key heads, head width."""


class Case:
    """A step's projections, one tensor, and planes that hold 7."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
        tokens, heads, key_heads, width = shape
        self.projected = random(tokens, heads + 2 * key_heads, width, dtype=dtype)
        self.q, self.k, self.v = self.projected.split((heads, key_heads, key_heads), dim=1)
        self.inv_freq = 1.0 / 10000.0 ** (torch.arange(0, width, 2, device=DEVICE) / width)
        self.table = rope_table(self.inv_freq, 0.75, 4096)
        self.positions = torch.arange(tokens, device=DEVICE) * 777
        self.slots = (torch.arange(tokens, device=DEVICE) * 5 + 3) % 64
        self.keys, self.values = (
            torch.full((64, key_heads * width), 7.0, dtype=dtype, device=DEVICE) for _ in range(2)
        )
        # A weight around 1, as trained ones are.
        self.norms = tuple(1.0 + random(width, dtype=dtype, seed=seed, scale=0.3) for seed in (2, 3))

    def run(self, **options: object) -> None:
        places = (self.table, self.positions, self.slots, self.keys, self.values)
        kernels.grouped_rope_cache(self.q, self.k, self.v, *places, eps=1e-6, **options)

    def exact(self, x: Tensor, norm: Tensor | None, *, interleaved: bool) -> Tensor:
        wide = x.double() if norm is None else rms_norm(x.double(), norm.double(), 1e-6)
        rotation = rope.rotations(self.positions, self.inv_freq, 0.75).to(torch.complex128)
        if not interleaved:
            wide = wide[..., rope.interleaving(x.shape[-1]).to(x.device)]
        turned = torch.view_as_real(torch.view_as_complex(wide.unflatten(-1, (-1, 2)).contiguous()) * rotation)
        return turned.flatten(-2) if interleaved else torch.cat((turned[..., 0], turned[..., 1]), dim=-1)


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("interleaved", [True, False], ids=["pairs", "halves"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_queries_turn_and_keys_and_values_are_written(
    shape: tuple[int, int, int, int], dtype: torch.dtype, interleaved: bool, norm: bool
) -> None:
    case = Case(shape, dtype)
    before = case.projected.clone()
    q, k, v = before.split((case.q.shape[1], case.k.shape[1], case.k.shape[1]), dim=1)
    norms = case.norms if norm else None
    case.run(interleaved=interleaved, norms=norms)
    # Qwen3's norm rounds twice more on the way.
    tolerance = TOLERANCE[dtype] * (2 if norm else 1)
    exact_q = case.exact(q, case.norms[0] if norm else None, interleaved=interleaved)
    exact_k = case.exact(k, case.norms[1] if norm else None, interleaved=interleaved)
    assert relative_error(case.q, exact_q) < tolerance
    assert relative_error(case.keys[case.slots], exact_k.flatten(1)) < tolerance
    torch.testing.assert_close(case.values[case.slots], v.flatten(1), rtol=0, atol=0)
    torch.testing.assert_close(case.projected[:, q.shape[1] :], before[:, q.shape[1] :], rtol=0, atol=0)
    others = torch.ones(64, dtype=torch.bool, device=DEVICE).index_fill_(0, case.slots, False)
    assert (case.keys[others] == 7.0).all()
    assert (case.values[others] == 7.0).all()


def test_the_reference_agrees() -> None:
    case = Case((5, 32, 8, 128), DTYPES[0])
    q, k = (
        rope.rotate_pairs_(rms_norm(x, weight, 1e-6), rope.rotations(case.positions, case.inv_freq, 0.75))
        for x, weight in zip((case.q, case.k), case.norms, strict=True)
    )
    case.run(norms=case.norms)
    assert relative_error(case.q, q) < 2 * TOLERANCE[DTYPES[0]]
    assert relative_error(case.keys[case.slots], k.flatten(1)) < 2 * TOLERANCE[DTYPES[0]]


def test_halves_and_pairs_are_one_rotation_in_two_orders() -> None:
    halves, pairs = Case((3, 4, 2, 64), DTYPES[0]), Case((3, 4, 2, 64), DTYPES[0])
    order = rope.interleaving(64).to(DEVICE)
    pairs.projected[:, :6] = pairs.projected[:, :6][..., order]
    pairs.norms = tuple(weight[order] for weight in pairs.norms)
    halves.run(interleaved=False, norms=halves.norms)
    pairs.run(norms=pairs.norms)
    assert relative_error(pairs.q, halves.q[..., order]) < TOLERANCE[DTYPES[0]]


def test_a_padded_row_writes_nothing() -> None:
    case = Case((3, 4, 2, 64), DTYPES[1])
    case.slots[1] = -1
    case.run()
    for plane in (case.keys, case.values):
        written = (plane != 7.0).any(-1).nonzero().flatten().tolist()
        assert written == sorted(case.slots[[0, 2]].tolist())


@pytest.mark.gpu
def test_slots_past_two_to_the_31st() -> None:
    case = Case((3, 32, 8, 128), torch.bfloat16)
    small = case.keys, case.values
    case.run()
    slots = 2**31 // 1024 + 64
    turned = Case((3, 32, 8, 128), torch.bfloat16)
    turned.keys, turned.values = (torch.empty(slots, 1024, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    turned.slots = case.slots + slots - 64
    turned.run()
    for plane, expected in zip((turned.keys, turned.values), small, strict=True):
        torch.testing.assert_close(plane[turned.slots], expected[case.slots], rtol=0, atol=0)
