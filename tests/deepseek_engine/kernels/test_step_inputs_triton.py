import pytest
import torch
from device_kernels import DEVICE, DTYPES, dtype_name, needs_device, random
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
from deepseek_engine.kernels.step_inputs_triton import apply_edits, embed

pytestmark = needs_device


def integers(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@settings(max_examples=20)
@given(st.integers(1, 700), st.integers(0, 700), st.randoms(use_true_random=False))
def test_edits_are_applied_and_nothing_else_is_touched(size, count, chance):
    target = [chance.randint(-5, 5) for _ in range(size)]
    places = chance.sample(range(size), min(count, size))
    # Places below 0 are padding, and may stand anywhere.
    places = [place for place in places for place in ([place, -1] if chance.random() < 0.3 else [place])]
    values = [chance.randint(-(2**31), 2**31 - 1) for _ in places]
    expected = list(target)
    for place, value in zip(places, values, strict=True):
        if place >= 0:
            expected[place] = value
    tensor = integers(target)
    apply_edits(tensor, integers(places), integers(values))
    assert tensor.tolist() == expected


@pytest.mark.parametrize("count", [1, 511, 512, 513, 1025])
def test_edits_of_more_than_a_block(count: int) -> None:
    target = torch.zeros(1100, dtype=torch.int32, device=DEVICE)
    places = torch.randperm(1100)[:count]
    apply_edits(target, places.to(torch.int32).to(DEVICE), integers(list(range(1, count + 1))))
    assert target.cpu()[places].tolist() == list(range(1, count + 1))
    assert int((target != 0).sum()) == count


def test_a_table_of_several_rows_is_edited_by_flat_places() -> None:
    tables = torch.zeros(3, 7, dtype=torch.int32, device=DEVICE)
    apply_edits(tables, integers([8, -1, 20]), integers([5, 9, 6]))
    assert tables.nonzero().tolist() == [[1, 1], [2, 6]]
    assert (tables[1, 1].item(), tables[2, 6].item()) == (5, 6)


@pytest.mark.parametrize("width", [8, 64, 1024, 1032, 2048])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_tokens_become_their_embeddings_bit_for_bit(width: int, dtype: torch.dtype) -> None:
    embedding = random(11, width, dtype=dtype)
    tokens = integers([3, 0, 10, 3, 7], torch.int64)
    sources = integers([-1, 2, -1, 0, 1])
    last = integers([9, 4, 1], torch.int64)
    out = embed(tokens, sources, last, embedding)
    assert torch.equal(out, embedding[integers([3, 1, 10, 9, 4], torch.int64)])


def test_a_token_that_is_named_by_its_source_is_not_looked_at() -> None:
    embedding = random(5, 16, dtype=DTYPES[1])
    out = embed(integers([-1], torch.int64), integers([0]), integers([4], torch.int64), embedding)
    assert torch.equal(out, embedding[4:])
