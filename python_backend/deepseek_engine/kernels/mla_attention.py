"""Multi-head latent attention over the paged latent cache.

DeepSeek-V2 (arXiv:2405.04434, section 2.1.2 and appendix C). A token's cache entry is [c | k_pe]: the normalised
latent, C wide, and the rotated key that all heads share. With kv_b = [W_UK; W_UV] a head,

    expanded: score = (q_nope . W_UK c + q_pe . k_pe) * scale,    o = sum_t p_t W_UV c_t
    absorbed: score = (W_UK^T q_nope . c + q_pe . k_pe) * scale,  o = W_UV (sum_t p_t c_t)

The two are equal. The absorbed form reads the cache once for all heads, which is what decoding wants; the expanded form
does less arithmetic once many queries share the context.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from deepseek_engine.kernels.attention_plan import AttentionPlan, Chunk, DecodeGroup
from deepseek_engine.kernels.chunk_attention import chunk_attention


def mla_attention(
    q_nope: Tensor, q_pe: Tensor, latents: Tensor, kv_b: Tensor, plan: AttentionPlan, scale: float
) -> Tensor:
    """Attend to the cache, which already holds the step's own entries.

    q_nope [T, H, nope] and q_pe [T, H, rope], rotated; latents [slots, C + rope], one layer's plane; kv_b
    [H, nope + v, C], nope rows first. Returns [T, H * v].
    """
    nope = q_nope.shape[-1]
    w_uk, w_uv = kv_b[:, :nope], kv_b[:, nope:]
    if len(plan.groups) == 1 and plan.groups[0].tokens is None:
        return _decode(q_nope, q_pe, latents, w_uk, w_uv, plan.groups[0], scale)
    out = q_nope.new_empty(q_nope.shape[0], w_uv.shape[0] * w_uv.shape[1])
    for group in plan.groups:
        out[group.tokens] = _decode(q_nope[group.tokens], q_pe[group.tokens], latents, w_uk, w_uv, group, scale)
    for chunk in plan.chunks:
        entries = latents.index_select(0, chunk.slots)
        attend = _expanded if _prefers_expanded(q_nope, q_pe, kv_b, chunk) else _absorbed
        out[chunk.tokens] = attend(q_nope[chunk.tokens], q_pe[chunk.tokens], entries, kv_b, chunk, scale)
    return out


def _decode(
    q_nope: Tensor, q_pe: Tensor, latents: Tensor, w_uk: Tensor, w_uv: Tensor, group: DecodeGroup, scale: float
) -> Tensor:
    entries = latents.index_select(0, group.slots).unflatten(0, (-1, group.length))
    query = _absorb(q_nope, q_pe, w_uk)
    scores = torch.baddbmm(group.mask, query, entries.transpose(1, 2), alpha=scale)
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    mixed = torch.bmm(probabilities, entries[..., : w_uk.shape[-1]])
    return _project_values(mixed, w_uv)


def _absorbed(q_nope: Tensor, q_pe: Tensor, entries: Tensor, kv_b: Tensor, chunk: Chunk, scale: float) -> Tensor:
    """A chunk in the absorbed form: all heads of all its queries against one key."""
    nope, rank = q_nope.shape[-1], kv_b.shape[-1]
    query = _absorb(q_nope, q_pe, kv_b[:, :nope])
    mixed = query.new_empty(*query.shape[:2], rank)
    for piece in chunk.pieces:
        keys = entries[: piece.length]
        scores = (query[piece.queries] @ keys.t()).mul_(scale).add_(piece.mask.unsqueeze(1))
        probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        mixed[piece.queries] = probabilities @ keys[:, :rank]
    return _project_values(mixed, kv_b[:, nope:])


def _expanded(q_nope: Tensor, q_pe: Tensor, entries: Tensor, kv_b: Tensor, chunk: Chunk, scale: float) -> Tensor:
    """A chunk in the expanded form: every head's keys and values are made from the latents first."""
    heads, nope, rank = q_nope.shape[1], q_nope.shape[2], kv_b.shape[-1]
    expanded = F.linear(entries[:, :rank], kv_b.flatten(0, 1)).unflatten(-1, (heads, -1))
    shared = entries[:, None, rank:].expand(-1, heads, -1)
    keys = torch.cat((expanded[..., :nope], shared), dim=-1)
    queries = torch.cat((q_nope, q_pe), dim=-1)
    return chunk_attention(queries, keys, expanded[..., nope:], chunk, scale)


def _absorb(q_nope: Tensor, q_pe: Tensor, w_uk: Tensor) -> Tensor:
    """[W_UK^T q_nope | q_pe], [n, H, C + rope]."""
    return torch.cat((torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1), q_pe), dim=-1)


def _project_values(mixed: Tensor, w_uv: Tensor) -> Tensor:
    """W_UV applied to each head's mixture of latents [n, H, C]; returns [n, H * v]."""
    return torch.bmm(mixed.transpose(0, 1), w_uv.transpose(1, 2)).transpose(0, 1).flatten(1)


def _prefers_expanded(q_nope: Tensor, q_pe: Tensor, kv_b: Tensor, chunk: Chunk) -> bool:
    """Compare the multiplications a head that either form takes."""
    both, rank = kv_b.shape[1], kv_b.shape[2]
    rope = q_pe.shape[-1]
    queries, length = chunk.tokens.stop - chunk.tokens.start, chunk.slots.shape[0]
    absorbed = queries * both * rank + queries * length * (2 * rank + rope)
    expanded = length * both * rank + queries * length * (both + rope)
    return expanded < absorbed
