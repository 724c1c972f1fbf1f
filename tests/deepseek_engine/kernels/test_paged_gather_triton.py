import pytest
import torch
from device_kernels import DEVICE, DTYPES, dtype_name, needs_device, random

pytest.importorskip("triton")
from deepseek_engine.kernels.paged_gather_triton import gather_entries

pytestmark = needs_device


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize(("width", "page"), [(48, 16), (576, 64), (128, 32)])
@pytest.mark.parametrize("first", [0, 37])
def test_entries_are_those_of_the_tables_in_order(width: int, page: int, first: int, dtype: torch.dtype) -> None:
    lengths = [1, 150, 64, 33]
    blocks = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    plane = random(40 * page, width, dtype=dtype)
    tables = torch.full((6, 14), 2**30, dtype=torch.int32)
    table_rows = torch.tensor([4, 0, 5, 2], dtype=torch.int32)
    slots, used = [], 0
    for row, length in zip(table_rows.tolist(), lengths, strict=True):
        count = -(-(first + length) // page)
        own = blocks[used : used + count] if used + count <= 40 else blocks[:count]
        used += count
        tables[row, :count] = own.int()
        positions = torch.arange(first, first + length)
        slots.append(own[positions // page] * page + positions % page)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    out = gather_entries(
        plane,
        tables.to(DEVICE),
        table_rows.to(DEVICE),
        starts.to(DEVICE),
        page=page,
        keys=sum(lengths),
        longest=max(lengths),
        first=first,
    )
    assert torch.equal(out, plane[torch.cat(slots).to(DEVICE)])
