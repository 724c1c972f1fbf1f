"""Grouped-query attention over a paged cache against the formula in float64."""

import pytest
import torch
from deepseek_engine.batch import Batch
from deepseek_engine.kernels.attention_plan import attention_plan
from deepseek_engine.kernels.paged_attention import paged_attention
from torch import Tensor

WIDTH, BLOCK = 6, 4
SCALE = 0.4


def exact(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The last n of L positions attend causally: q [n, H, d], keys and values [L, K, d]."""
    repeats = q.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(repeats, dim=1) for x in (keys, values))
    hidden = torch.ones(q.shape[0], keys.shape[0]).triu(keys.shape[0] - q.shape[0] + 1).bool()
    scores = torch.einsum("qhd,lhd->hql", q.double(), keys) * SCALE
    return torch.einsum("hql,lhd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values).flatten(1)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(
    ("lengths", "counts"),
    [([1], [1]), ([9, 3, 17], [1, 1, 1]), ([9], [9]), ([30], [4]), ([9, 20, 5, 1], [1, 7, 5, 1]), ([700], [600])],
    ids=str,
)
def test_float64(lengths: list[int], counts: list[int], heads: int, kv_heads: int) -> None:
    torch.manual_seed(sum(lengths) + heads)
    widest = -(-max(lengths) // BLOCK)
    tables = torch.randperm(len(lengths) * widest).view(len(lengths), widest)
    planes = [torch.full((tables.numel() * BLOCK, kv_heads * WIDTH), float("nan")) for _ in range(2)]
    own = []
    for row, length in enumerate(lengths):
        slots = (tables[row, :, None] * BLOCK + torch.arange(BLOCK)).flatten()[:length]
        own.append([torch.randn(length, kv_heads, WIDTH) for _ in planes])
        for plane, entries in zip(planes, own[-1], strict=True):
            plane[slots] = entries.flatten(1)
    starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    unused = torch.zeros(starts[-1], dtype=torch.int64)
    plan = attention_plan(Batch(unused, unused, unused, starts, lengths, tables, BLOCK), torch.float32)
    q = torch.randn(starts[-1], heads, WIDTH)
    found = paged_attention(q, *planes, plan, SCALE)
    expected = torch.cat([exact(queries, *kept) for queries, kept in zip(q.split(counts), own, strict=True)])
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
