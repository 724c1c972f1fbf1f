import pytest
import torch
from device_kernels import DEVICE, DTYPES, dtype_name, needs_device, relative_error
from grouped_case import GroupedCase
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
from deepseek_engine.kernels import grouped_decode_triton as kernels
from deepseek_engine.kernels.attention_plan import AttentionPlan, DecodeGroup
from deepseek_engine.kernels.dispatch import NoVariantError
from deepseek_engine.kernels.paged_attention import paged_attention

pytestmark = needs_device
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def plan_of(case: GroupedCase, **options: object) -> kernels.GroupedDecodePlan:
    return kernels.grouped_decode_plan(
        case.device_lengths,
        case.query_starts,
        case.tables,
        page=case.page,
        heads=case.heads,
        key_heads=case.key_heads,
        width=case.width,
        dtype=case.dtype,
        max_queries=max(case.queries),
        **{"table_rows": case.table_rows} | options,
    )


def check(case: GroupedCase, **forced: object) -> None:
    out, lse = kernels.grouped_decode(case.q, case.keys, case.values, plan_of(case, **forced), case.scale)
    exact_out, exact_lse = case.exact()
    assert torch.isfinite(out).all()
    assert relative_error(out, exact_out) < TOLERANCE[case.dtype]
    seen = exact_lse.isfinite()
    assert (lse[~seen] == float("-inf")).all()
    torch.testing.assert_close(lse.double()[seen], exact_lse[seen], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("page", kernels.PAGES)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_pages(page: int, dtype: torch.dtype) -> None:
    check(GroupedCase([1, 65, 200], [1, 1, 1], 8, 2, 128, page, dtype))


@pytest.mark.parametrize("width", [64, 80, 96, 112, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_head_widths(width: int, dtype: torch.dtype) -> None:
    check(GroupedCase([50, 7, 129], [2, 1, 1], 4, 2, width, 16, dtype))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12])
def test_query_heads_of_a_key_head(group: int) -> None:
    check(GroupedCase([70, 3], [1, 1], group * 2, 2, 64, 32, DTYPES[1]))


@pytest.mark.parametrize(("heads", "key_heads", "queries"), [(4, 4, [8, 5]), (14, 2, [3, 8]), (12, 1, [7, 8])], ids=str)
def test_causal_query_tokens(heads: int, key_heads: int, queries: list[int]) -> None:
    check(GroupedCase([37, 130], queries, heads, key_heads, 128, 64, DTYPES[1]))


@pytest.mark.parametrize("workers", [1, 7, 40])
def test_any_number_of_spans_gives_the_same(workers: int) -> None:
    check(GroupedCase([300, 1, 64, 129], [1, 1, 1, 1], 8, 2, 64, 64, DTYPES[1]), workers=workers)


def test_a_part_that_early_queries_do_not_see_weighs_nothing() -> None:
    # The second span holds the last two tokens alone.
    check(GroupedCase([130], [8], 4, 2, 64, 64, DTYPES[1]), workers=2)


@pytest.mark.parametrize("max_queries", [1, 4])
def test_fixed_splits_do_not_depend_on_the_other_sequences(max_queries: int) -> None:
    case = GroupedCase([130, 0, 300, 1], [max_queries, 1, 1, 1], 8, 2, 64, 16, DTYPES[1])
    out, _ = kernels.grouped_decode(case.q, case.keys, case.values, plan_of(case, fixed_tokens=512), case.scale)
    assert relative_error(out[:max_queries], case.exact()[0][:max_queries]) < TOLERANCE[case.dtype]
    case.lengths, case.queries, case.table_rows = [130], [max_queries], case.table_rows[:1]
    plan = plan_of(case, fixed_tokens=512)
    own, _ = kernels.grouped_decode(case.q[:max_queries], case.keys, case.values, plan, case.scale)
    assert torch.equal(own, out[:max_queries])


def test_a_padded_row_and_early_queries_without_keys_are_empty() -> None:
    case = GroupedCase([40, 0, 2], [1, 1, 4], 4, 2, 64, 16, DTYPES[1])
    out, lse = kernels.grouped_decode(case.q, case.keys, case.values, plan_of(case), case.scale)
    assert (out[1:4] == 0).all()
    assert (lse[1:4] == float("-inf")).all()
    assert torch.isfinite(lse[4:]).all()


def test_one_plan_serves_other_lengths_and_tables() -> None:
    case, other = (GroupedCase(lengths, [1, 1, 1], 6, 2, 64, 32, DTYPES[1]) for lengths in ([9, 200, 33], [150, 0, 64]))
    tables = torch.zeros(5, 9, dtype=torch.int32, device=DEVICE)
    plan = plan_of(case, table_rows=case.table_rows.clone())
    plan.tables = tables
    for part in (case, other):
        tables[:, : part.tables.shape[1]] = part.tables
        plan.lengths.copy_(part.device_lengths)
        plan.table_rows.copy_(part.table_rows)
        plan.schedule()
        out, _ = kernels.grouped_decode(part.q, part.keys, part.values, plan, part.scale)
        assert relative_error(out, part.exact()[0]) < TOLERANCE[part.dtype]


def test_a_sequence_uses_its_own_row_where_no_index_is_given() -> None:
    case = GroupedCase([40, 70], [1, 1], 4, 2, 64, 16, DTYPES[1])
    plan = plan_of(case, table_rows=None)
    plan.tables = case.tables[case.table_rows.long()].contiguous()
    out, _ = kernels.grouped_decode(case.q, case.keys, case.values, plan, case.scale)
    assert relative_error(out, case.exact()[0]) < TOLERANCE[case.dtype]


def test_the_reference_agrees() -> None:
    case = GroupedCase([33, 33], [1, 1], 6, 2, 64, 16, DTYPES[0])
    out, _ = kernels.grouped_decode(case.q, case.keys, case.values, plan_of(case), case.scale)
    slots = torch.tensor(case.slots, device=DEVICE)
    group = DecodeGroup(None, slots.flatten(), torch.zeros(2, 1, 33, dtype=case.dtype, device=DEVICE), 33)
    expected = paged_attention(case.q, case.keys, case.values, AttentionPlan(slots[:, -1], [group], []), case.scale)
    assert relative_error(out.flatten(1), expected) < 2 * TOLERANCE[case.dtype]


@pytest.mark.parametrize("tiling", kernels.TILINGS, ids=lambda tiling: tiling.name)
def test_every_tiling(tiling: kernels.Tiling) -> None:
    if DEVICE.type == "cuda" and 90 not in tiling.architectures:
        pytest.skip("declared for another architecture")
    for page in (64, 16, 0):
        case = GroupedCase([130, 33], [2, 1], 10, 2, tiling.width if tiling.whole else 96, page, DTYPES[1])
        check(case, variant=tiling.variant(page))


def test_what_decode_does_not_take_is_refused() -> None:
    with pytest.raises(ValueError, match="1 to 8 query tokens"):
        plan_of(GroupedCase([20], [9], 2, 1, 64, 16, DTYPES[1]))
    with pytest.raises(ValueError, match="no multiple of 3 key heads"):
        kernels.group_size(8, 3)
    with pytest.raises(NoVariantError, match="width 256"):
        plan_of(GroupedCase([20], [1], 2, 1, 256, 16, DTYPES[1]))


@settings(deadline=None, max_examples=12)
@given(
    lengths=st.lists(st.integers(0, 150), min_size=1, max_size=5),
    workers=st.integers(1, 9),
    page=st.sampled_from((16, 64, 0)),
    heads=st.sampled_from(((4, 4), (4, 1), (6, 2))),
    data=st.data(),
)
def test_any_lengths(lengths: list[int], workers: int, page: int, heads: tuple[int, int], data: st.DataObject) -> None:
    queries = [data.draw(st.integers(1, max(1, min(length, 4)))) for length in lengths]
    check(GroupedCase(lengths, queries, *heads, 64, page, DTYPES[0]), workers=workers)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "key_heads"), [(32, 8), (32, 32), (28, 4), (8, 1)], ids=str)
@pytest.mark.parametrize("page", kernels.PAGES)
def test_poison_between_the_sequences_does_not_leak(page: int, heads: int, key_heads: int) -> None:
    check(
        GroupedCase([1, 65, 4111, 700], [1, 3, 1, 8], heads, key_heads, 128, page, torch.bfloat16, poison=float("nan"))
    )


@pytest.mark.gpu
def test_offsets_past_two_to_the_31st() -> None:
    slots = 2**31 // 1024 + 4096
    planes = [torch.zeros(slots, 1024, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    case = GroupedCase([200], [1], 32, 8, 128, 64, torch.bfloat16)
    exact = case.exact()[0]
    case.move_to(*planes)
    out, _ = kernels.grouped_decode(case.q, case.keys, case.values, plan_of(case), case.scale)
    assert relative_error(out, exact) < TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
def test_a_graph_serves_any_lengths() -> None:
    case = GroupedCase([4111, 1, 700], [1, 1, 1], 32, 8, 128, 64, torch.bfloat16)
    plan = plan_of(case)

    def step() -> torch.Tensor:
        plan.schedule()
        return kernels.grouped_decode(case.q, case.keys, case.values, plan, case.scale)[0]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for lengths in ([4111, 1, 700], [5, 0, 650], [3000, 1, 1]):
        plan.lengths.copy_(torch.tensor(lengths))
        graph.replay()
        assert relative_error(out, case.exact(lengths)[0]) < TOLERANCE[torch.bfloat16]
