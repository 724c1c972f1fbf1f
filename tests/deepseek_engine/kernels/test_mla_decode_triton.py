from dataclasses import dataclass, field

import pytest
import torch
from device_kernels import DEVICE, DTYPES, dtype_name, needs_device, random, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")
from deepseek_engine.kernels import mla_decode_triton as kernels

pytestmark = needs_device
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass
class Case:
    """Sequences in one shuffled cache, whose unused slots and block tails hold `poison`."""

    lengths: list[int]
    queries: list[int]
    heads: int
    rank: int
    rotary: int
    page: int
    dtype: torch.dtype
    seed: int = 0
    poison: float = 1e4
    slots: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        width = self.rank + self.rotary
        page = self.page or 1
        blocks = [-(-length // page) for length in self.lengths]
        order = torch.randperm(sum(blocks) + 2, generator=torch.Generator().manual_seed(self.seed)).tolist()
        self.plane = torch.full((len(order) * page, width), self.poison, dtype=self.dtype, device=DEVICE)
        self.tables = torch.full((len(blocks), max(*blocks, 1) + 1), 2**20, dtype=torch.int32)
        self.slots = []
        for row, (count, length) in enumerate(zip(blocks, self.lengths, strict=True)):
            own = [order.pop() for _ in range(count)]
            self.tables[row, :count] = torch.tensor(own, dtype=torch.int32)
            self.slots.append([own[n // page] * page + n % page for n in range(length)])
            if length:
                self.plane[self.slots[-1]] = random(length, width, dtype=self.dtype, seed=row + self.seed)
        self.tables = self.tables.to(DEVICE)
        tokens = sum(self.queries)
        self.q = random(tokens, self.heads, self.rank, dtype=self.dtype, seed=1, scale=self.rank**-0.5)
        self.q_pe = random(tokens, self.heads, 128 + self.rotary, dtype=self.dtype, seed=2)[..., 128:]

    def plan(self, **forced: object) -> kernels.DecodePlan:
        starts = torch.tensor([0, *self.queries]).cumsum(0).to(torch.int32)
        return kernels.decode_plan(
            torch.tensor(self.lengths, dtype=torch.int32, device=DEVICE),
            starts.to(DEVICE),
            self.tables,
            page=self.page,
            heads=self.heads,
            rank=self.rank,
            rotary=self.rotary,
            dtype=self.dtype,
            max_queries=max(self.queries),
            **forced,
        )

    def exact(self, scale: float) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        queries = torch.cat((self.q, self.q_pe), dim=-1).double().split(self.queries)
        for length, slots, query in zip(self.lengths, self.slots, queries, strict=True):
            entries = self.plane[slots].double()
            scores = torch.einsum("thd,nd->thn", query, entries) * scale
            limit = torch.arange(length - query.shape[0], length, device=DEVICE)
            future = torch.arange(length, device=DEVICE) > limit[:, None, None]
            scores = scores.masked_fill(future, float("-inf"))
            lses.append(scores.logsumexp(-1))
            outs.append(scores.softmax(-1).nan_to_num(0.0) @ entries[:, : self.rank])
        return torch.cat(outs), torch.cat(lses)


def check(case: Case, **forced: object) -> None:
    out, lse = kernels.mla_decode(case.q, case.q_pe, case.plane, case.plan(**forced), 0.3)
    exact_out, exact_lse = case.exact(0.3)
    assert torch.isfinite(out).all()
    assert relative_error(out, exact_out) < TOLERANCE[case.dtype]
    seen = exact_lse.isfinite()
    assert (lse[~seen] == float("-inf")).all()
    torch.testing.assert_close(lse.double()[seen], exact_lse[seen], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("page", kernels.PAGES)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_deepseek_widths(page: int, dtype: torch.dtype) -> None:
    check(Case([1, 65, 200], [1, 1, 1], 16, 512, 64, page, dtype))


@pytest.mark.parametrize(
    ("heads", "queries"), [(1, [1, 1]), (3, [8, 5]), (16, [1, 1]), (20, [3, 2]), (64, [3, 2])], ids=str
)
def test_heads_and_causal_query_tokens(heads: int, queries: list[int]) -> None:
    check(Case([37, 130], queries, heads, 512, 64, 32, DTYPES[1]))


def test_128_heads() -> None:
    check(Case([97], [1], 128, 512, 64, 64, DTYPES[1]))


@pytest.mark.parametrize(("rank", "rotary"), [(32, 16), (64, 64), (96, 16), (256, 64)])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_other_latent_widths(rank: int, rotary: int, dtype: torch.dtype) -> None:
    check(Case([50, 7], [2, 1], 4, rank, rotary, 16, dtype))


@pytest.mark.parametrize("workers", [1, 7, 40])
def test_any_number_of_spans_gives_the_same(workers: int) -> None:
    check(Case([300, 1, 64, 129], [1, 1, 1, 1], 16, 64, 64, 64, DTYPES[1]), workers=workers)


def test_a_padded_row_and_early_queries_without_keys_are_empty() -> None:
    case = Case([40, 0, 2], [1, 1, 4], 4, 64, 16, 16, DTYPES[1])
    out, lse = kernels.mla_decode(case.q, case.q_pe, case.plane, case.plan(), 0.3)
    assert (out[1] == 0).all()
    assert (lse[1] == float("-inf")).all()
    assert (lse[2:4] == float("-inf")).all()
    assert (out[2:4] == 0).all()
    assert torch.isfinite(lse[4:]).all()


@pytest.mark.parametrize("tiling", kernels.TILINGS, ids=lambda tiling: tiling.name)
def test_every_tiling(tiling: kernels.Tiling) -> None:
    if DEVICE.type == "cuda" and 90 not in tiling.architectures:
        pytest.skip("declared for another architecture")
    for page in (64, 0):
        case = Case([130, 33], [2, 1], 10, tiling.rank, tiling.rotary, page, DTYPES[1])
        check(case, variant=tiling.variant(page))


@settings(deadline=None, max_examples=12)
@given(
    lengths=st.lists(st.integers(0, 150), min_size=1, max_size=5),
    workers=st.integers(1, 9),
    page=st.sampled_from((16, 64, 0)),
    data=st.data(),
)
def test_any_lengths(lengths: list[int], workers: int, page: int, data: st.DataObject) -> None:
    queries = [data.draw(st.integers(1, max(1, min(length, 4)))) for length in lengths]
    check(Case(lengths, queries, 4, 64, 16, page, DTYPES[0]), workers=workers)


def test_spans_cover_every_tile_once() -> None:
    case = Case([300, 0, 64, 129], [1, 1, 1, 1], 4, 64, 16, 64, DTYPES[0])
    plan = case.plan(workers=5)
    tile = plan.variant.constants["TILE"]
    span, *ends = plan.plan[:6].tolist()
    tiles = [-(-length // tile) for length in case.lengths]
    assert ends == [0, *torch.tensor(tiles).cumsum(0).tolist()]
    assert span * 5 >= sum(tiles)
    first = plan.plan[6:].tolist()
    for worker, sequence in enumerate(first):
        if worker * span < sum(tiles):
            assert ends[sequence] <= worker * span < ends[sequence + 1]


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("page", kernels.PAGES)
def test_poison_between_the_sequences_does_not_leak(page: int, heads: int) -> None:
    check(Case([1, 65, 4111, 700], [1, 3, 1, 8], heads, 512, 64, page, torch.bfloat16, poison=float("nan")))


@pytest.mark.gpu
def test_offsets_past_two_to_the_31st() -> None:
    slots = 2**31 // 576 + 4096
    plane = torch.zeros(slots, 576, dtype=torch.bfloat16, device=DEVICE)
    case = Case([200], [1], 16, 512, 64, 64, torch.bfloat16)
    last = (slots // 64) - 5
    for block, source in enumerate(case.tables[0, :4].tolist()):
        plane[(last + block) * 64 : (last + block + 1) * 64] = case.plane[source * 64 : (source + 1) * 64]
        case.tables[0, block] = last + block
    exact = case.exact(0.3)[0]
    out, _ = kernels.mla_decode(case.q, case.q_pe, plane, case.plan(), 0.3)
    assert relative_error(out, exact) < TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_name)
@pytest.mark.parametrize(
    ("lengths", "queries", "heads"),
    [
        ([1, 65, 4111, 700, 64], [1, 1, 1, 1, 1], 128),
        ([1, 65, 4111, 700, 128], [1, 3, 1, 8, 2], 128),
        ([8, 200], [8, 8], 16),
        ([129, 0, 5000], [1, 1, 1], 33),
        ([20000], [1], 64),
    ],
    ids=str,
)
@pytest.mark.parametrize("workers", [None, 1, 5, 300])
def test_many_heads_by_hand(
    workers: int | None, lengths: list[int], queries: list[int], heads: int, dtype: torch.dtype
) -> None:
    case = Case(lengths, queries, heads, 512, 64, 64, dtype, poison=float("nan"))
    assert case.plan().variant.kernel == "mla_decode_wide"
    # However often: what a copy is late for differs from time to time.
    for _ in range(3):
        check(case, workers=workers)


@pytest.mark.gpu
def test_many_heads_by_hand_in_fixed_splits() -> None:
    case = Case([1, 65, 4111, 700, 64], [1, 1, 1, 1, 1], 128, 512, 64, 64, torch.bfloat16)
    check(case, fixed_tokens=8192)
