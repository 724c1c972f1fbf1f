"""Grouped-query attention over the paged cache of keys and values."""

import torch.nn.functional as F
from torch import Tensor

from deepseek_engine.kernels.attention_plan import AttentionPlan, DecodeGroup
from deepseek_engine.kernels.chunk_attention import chunk_attention


def paged_attention(q: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """softmax(q k^T * scale) v a head, each key head serving H / K query heads (GQA, arXiv:2305.13245).

    q [T, H, d], rotated; keys and values [slots, K * d], one layer's planes, which already hold the step's own entries.
    Returns [T, H * d].
    """
    width = q.shape[-1]
    if plan.single is not None:
        return _decode(q, keys, values, plan.single, scale)
    out = q.new_empty(q.shape[0], q.shape[1] * width)
    for group in plan.groups:
        out[group.tokens] = _decode(q[group.tokens], keys, values, group, scale)
    for chunk in plan.chunks:
        k, v = (plane.index_select(0, chunk.slots).unflatten(-1, (-1, width)) for plane in (keys, values))
        out[chunk.tokens] = chunk_attention(q[chunk.tokens], k, v, chunk, scale)
    return out


def _decode(q: Tensor, keys: Tensor, values: Tensor, group: DecodeGroup, scale: float) -> Tensor:
    width = q.shape[-1]
    k, v = (
        plane.index_select(0, group.slots).unflatten(0, (-1, group.length)).unflatten(-1, (-1, width)).transpose(1, 2)
        for plane in (keys, values)
    )
    # The query heads of a key head stand in for positions: they share its keys, and there is nothing causal to mask.
    grouped = q.unflatten(1, (k.shape[1], -1))
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=group.mask.unsqueeze(1), scale=scale)
    return out.flatten(1)
