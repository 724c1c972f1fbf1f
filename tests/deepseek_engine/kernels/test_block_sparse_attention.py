"""The plain form of block-sparse attention against torch's own attention in float64."""

import torch
import torch.nn.functional as F
from deepseek_engine.kernels.block_masks import Causal, Window
from deepseek_engine.kernels.block_sparse_attention import PIECE, block_sparse_attention

SCALE = 0.3


def test_float64() -> None:
    queries, keys = PIECE + 40, PIECE + 60
    q, k, v = torch.randn(2, queries, 4, 12), torch.randn(2, keys, 2, 8), torch.randn(2, keys, 2, 5)
    k_pe = torch.randn(2, keys, 4)
    mask = Causal(20) & Window(50, 20)
    out, lse = block_sparse_attention(q, k, v, mask, SCALE, k_pe=k_pe)
    whole = torch.cat((k, k_pe.unsqueeze(2).expand(-1, -1, 2, -1)), dim=-1)
    key, query = torch.arange(keys), torch.arange(queries).unsqueeze(-1) + 20
    seen = (key <= query) & (key > query - 50)
    exact = F.scaled_dot_product_attention(
        *(x.double().transpose(1, 2) for x in (q, whole, v)), attn_mask=seen, scale=SCALE, enable_gqa=True
    )
    torch.testing.assert_close(out.double(), exact.transpose(1, 2), rtol=1e-5, atol=1e-5)
    scores = torch.einsum("bthd,bnhd->bthn", q.double(), whole.double().repeat_interleave(2, dim=2)) * SCALE
    exact_lse = scores.masked_fill(~seen.unsqueeze(1), float("-inf")).logsumexp(-1)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


def test_a_query_that_sees_nothing_is_0() -> None:
    q, k, v = (torch.randn(1, 9, 1, 4) for _ in range(3))
    out, lse = block_sparse_attention(q, k, v, lambda b, h, query, key: (query > 4) & (key <= query), SCALE)
    assert (out[:, :5] == 0).all()
    assert (lse[:, :5] == float("-inf")).all()
    assert lse[:, 5:].isfinite().all()
