"""Attention under a mask function, the plain form: every score is computed, and those of unseen keys are dropped.

    s[t, n] = q[t] . k[n] * scale where query t sees key n, else -inf,    out[t] = sum_n softmax(s[t])[n] v[n]

a batch and head; the masks stand in `block_masks.py`.
"""

import torch
from torch import Tensor

from deepseek_engine.kernels.block_masks import Mask, MaskFunction

PIECE = 256
"""Queries at once, which bounds the memory that masks and scores take."""


def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | MaskFunction, scale: float, *, k_pe: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """q [B, T, H, d], k [B, S, K, d] and v [B, S, K, w] with H a multiple of K; query t's key has no set place.

    k_pe [B, S, r] or [B, S, K, r]: the second part of the keys, of which k is the first; q has both, [.., d + r].
    Computes in float32, or in float64 if q is that. Returns out [B, T, H, w] of q's dtype and the log-sum-exp
    [B, T, H] of the scores; 0 and -inf where a query sees no key.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    if k_pe is not None:
        shared = k_pe.unsqueeze(2) if k_pe.dim() == 3 else k_pe
        k = torch.cat((k, shared.expand(*k.shape[:3], -1)), dim=-1)
    k, v = (x.to(wide).repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    batch, head, query, key = (
        torch.arange(count, device=q.device).view([-1 if axis == own else 1 for axis in range(4)])
        for own, count in enumerate((q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
    )
    outs, lses = [], []
    for part, numbers in zip(q.to(wide).split(PIECE, dim=1), query.split(PIECE, dim=2), strict=True):
        scores = torch.einsum("bthd,bnhd->bhtn", part, k) * scale
        scores = scores.masked_fill(~mask(batch, head, numbers, key), float("-inf"))
        lse = scores.logsumexp(-1)
        weights = (scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)).exp()
        outs.append(torch.einsum("bhtn,bnhw->bthw", weights, v).to(q.dtype))
        lses.append(lse.transpose(1, 2))
    return torch.cat(outs, dim=1), torch.cat(lses, dim=1)
