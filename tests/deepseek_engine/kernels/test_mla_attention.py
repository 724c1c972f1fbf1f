"""Latent attention over a paged cache against the expanded formula in float64."""

import pytest
import torch
from deepseek_engine.batch import Batch
from deepseek_engine.kernels import mla_attention as kernel
from deepseek_engine.kernels.attention_plan import attention_plan
from torch import Tensor

HEADS, NOPE, ROPE, VALUE, RANK, BLOCK = 3, 6, 4, 8, 10, 4
SCALE = 0.3


def exact(q: Tensor, entries: Tensor, kv_b: Tensor) -> Tensor:
    """The last n of L positions attend causally: q [n, H, nope + rope], entries [L, C + rope]."""
    q, entries, kv_b = q.double(), entries.double(), kv_b.double()
    keys = torch.einsum("hnc,lc->lhn", kv_b[:, :NOPE], entries[:, :RANK])
    values = torch.einsum("hvc,lc->lhv", kv_b[:, NOPE:], entries[:, :RANK])
    scores = torch.einsum("qhn,lhn->hql", q[..., :NOPE], keys) + torch.einsum(
        "qhr,lr->hql", q[..., NOPE:], entries[:, RANK:]
    )
    hidden = torch.ones(q.shape[0], entries.shape[0]).triu(entries.shape[0] - q.shape[0] + 1).bool()
    probabilities = (scores * SCALE).masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hql,lhv->qhv", probabilities, values).flatten(1)


def paged(lengths: list[int], counts: list[int]) -> tuple[Batch, Tensor, list[Tensor]]:
    """A batch of rows, its cache full of NaN but for the rows' own entries, and those entries."""
    widest = -(-max(lengths) // BLOCK)
    blocks = torch.randperm(len(lengths) * widest + 1)
    cache = torch.full((len(blocks) * BLOCK, RANK + ROPE), float("nan"))
    tables = torch.zeros(len(lengths), widest, dtype=torch.int64)
    entries = []
    for row, length in enumerate(lengths):
        used = -(-length // BLOCK)
        tables[row, :used] = blocks[row * widest : row * widest + used]
        slots = (tables[row, :used, None] * BLOCK + torch.arange(BLOCK)).flatten()[:length]
        entries.append(torch.randn(length, RANK + ROPE))
        cache[slots] = entries[-1]
    starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    unused = torch.zeros(starts[-1], dtype=torch.int64)
    return Batch(unused, unused, unused, starts, lengths, tables, BLOCK), cache, entries


@pytest.mark.parametrize(
    ("lengths", "counts"),
    [
        ([1], [1]),
        ([9], [1]),
        ([9, 3, 17], [1, 1, 1]),
        ([12, 12], [1, 1]),
        ([9], [9]),
        ([30], [4]),
        ([9, 20, 5, 1], [1, 7, 5, 1]),
        ([700], [600]),
        ([3000, 5, 7], [1, 1, 1]),
    ],
    ids=str,
)
@pytest.mark.parametrize("form", ["chosen", "absorbed", "expanded"])
def test_float64(lengths: list[int], counts: list[int], form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if form != "chosen":
        monkeypatch.setattr(kernel, "_prefers_expanded", lambda *arguments: form == "expanded")
    torch.manual_seed(sum(lengths))
    batch, cache, entries = paged(lengths, counts)
    q = torch.randn(batch.num_tokens, HEADS, NOPE + ROPE)
    kv_b = torch.randn(HEADS, NOPE + VALUE, RANK) / RANK**0.5
    found = kernel.mla_attention(q, cache, kv_b, attention_plan(batch, torch.float32), SCALE, NOPE)
    rows = zip(q.split(counts), entries, strict=True)
    expected = torch.cat([exact(queries, own, kv_b) for queries, own in rows])
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
