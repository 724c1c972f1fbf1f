import pytest
import torch
from device_kernels import DEVICE, DTYPES, dtype_name, needs_device, relative_error
from grouped_case import GroupedCase
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
from deepseek_engine.kernels import grouped_prefill_triton as kernels
from deepseek_engine.kernels.attention_plan import AttentionPlan, Chunk, Piece
from deepseek_engine.kernels.dispatch import NoVariantError
from deepseek_engine.kernels.paged_attention import paged_attention

pytestmark = needs_device
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def prefill(case: GroupedCase, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    return kernels.grouped_prefill(
        case.q,
        case.keys,
        case.values,
        case.query_starts,
        case.device_lengths,
        case.tables,
        page=case.page,
        scale=case.scale,
        **{"table_rows": case.table_rows, "longest": max(case.queries)} | options,
    )


def check(case: GroupedCase, **options: object) -> None:
    out, lse = prefill(case, **options)
    exact_out, exact_lse = case.exact()
    assert torch.isfinite(out).all()
    assert relative_error(out, exact_out) < TOLERANCE[case.dtype]
    seen = exact_lse.isfinite()
    assert (lse[~seen] == float("-inf")).all()
    torch.testing.assert_close(lse.double()[seen], exact_lse[seen], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("page", kernels.PAGES)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_prompts_and_cached_prefixes(page: int, dtype: torch.dtype) -> None:
    check(GroupedCase([150, 70, 200], [150, 1, 37], 8, 2, 128, page, dtype))


@pytest.mark.parametrize("width", [64, 80, 96, 112, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_head_widths(width: int, dtype: torch.dtype) -> None:
    check(GroupedCase([65, 99], [65, 3], 4, 2, width, 16, dtype))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12])
def test_query_heads_of_a_key_head(group: int) -> None:
    check(GroupedCase([70, 131], [41, 30], group * 2, 2, 64, 64, DTYPES[1]))


@pytest.mark.parametrize("row", kernels.GROUPED_PREFILL.variants, ids=lambda row: row.name)
def test_every_row(row: kernels.Variant) -> None:
    if DEVICE.type == "cuda" and 90 not in row.architectures:
        pytest.skip("declared for another architecture")
    width = row.constants["WIDTH"] if row.constants["WHOLE"] else 96
    check(GroupedCase([131, 90], [131, 5], 3, 1, width, row.constants["PAGE"], DTYPES[1]), row=row)


def test_padded_rows_and_queries_before_every_key_are_empty() -> None:
    case = GroupedCase([25, 0, 33], [40, 4, 6], 4, 2, 64, 16, DTYPES[1])
    check(case)
    out, lse = prefill(case)
    assert (out[:15] == 0).all()
    assert (lse[40:44] == float("-inf")).all()


def test_a_longer_grid_and_rows_without_queries_change_nothing() -> None:
    case = GroupedCase([70, 30, 45], [70, 0, 12], 4, 2, 64, 32, DTYPES[1])
    torch.testing.assert_close(prefill(case, longest=150), prefill(case), rtol=0, atol=0)
    check(case)


def test_a_row_uses_its_own_table_where_no_index_is_given() -> None:
    case = GroupedCase([40, 70], [10, 70], 4, 2, 64, 16, DTYPES[1])
    case.tables = case.tables[case.table_rows.long()].contiguous()
    check(case, table_rows=None)


def test_rows_of_another_tensor_take_the_result() -> None:
    case = GroupedCase([40], [40], 4, 2, 64, 16, DTYPES[1])
    out = torch.full((60, 4, 64), 7.0, dtype=case.dtype, device=DEVICE)
    prefill(case, out=out[10:50])
    assert relative_error(out[10:50], case.exact()[0]) < TOLERANCE[case.dtype]
    assert (out[:10] == 7.0).all()
    assert (out[50:] == 7.0).all()


def test_the_reference_agrees() -> None:
    case = GroupedCase([77], [30], 6, 2, 64, 16, DTYPES[0])
    slots = torch.tensor(case.slots[0], device=DEVICE)
    mask = torch.full((30, 77), float("-inf"), dtype=case.dtype, device=DEVICE).triu(48)
    chunk = Chunk(slice(0, 30), slots, [Piece(slice(0, 30), 77, mask)])
    plan = AttentionPlan(slots[47:], [], [chunk])
    expected = paged_attention(case.q, case.keys, case.values, plan, case.scale)
    assert relative_error(prefill(case)[0].flatten(1), expected) < 2 * TOLERANCE[case.dtype]


def test_what_no_row_serves_is_refused() -> None:
    with pytest.raises(NoVariantError, match="page 48"):
        prefill(GroupedCase([20], [9], 2, 1, 64, 48, DTYPES[1]))


@settings(deadline=None, max_examples=12)
@given(
    rows=st.lists(st.tuples(st.integers(0, 100), st.integers(0, 90)), min_size=1, max_size=4),
    page=st.sampled_from(kernels.PAGES),
    heads=st.sampled_from(((3, 3), (4, 1), (6, 2))),
)
def test_any_lengths(rows: list[tuple[int, int]], page: int, heads: tuple[int, int]) -> None:
    queries = [new for _, new in rows]
    if sum(queries):
        check(GroupedCase([cached + new for cached, new in rows], queries, *heads, 64, page, DTYPES[0]))


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "key_heads"), [(32, 8), (32, 32), (28, 4), (8, 1)], ids=str)
@pytest.mark.parametrize("page", kernels.PAGES)
def test_poison_past_the_keys_does_not_leak(page: int, heads: int, key_heads: int) -> None:
    case = GroupedCase(
        [70, 1, 2111, 700], [70, 1, 511, 90], heads, key_heads, 128, page, torch.bfloat16, poison=float("nan")
    )
    check(case)


@pytest.mark.gpu
def test_offsets_past_two_to_the_31st() -> None:
    slots = 2**31 // 1024 + 4096
    planes = [torch.zeros(slots, 1024, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    case = GroupedCase([200], [70], 32, 8, 128, 64, torch.bfloat16)
    exact = case.exact()[0]
    case.move_to(*planes)
    assert relative_error(prefill(case)[0], exact) < TOLERANCE[torch.bfloat16]
