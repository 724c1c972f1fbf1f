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


def mla_attention(q: Tensor, latents: Tensor, kv_b: Tensor, plan: AttentionPlan, scale: float, nope: int) -> Tensor:
    """Attend to the cache, which already holds the step's own entries.

    q [T, H, nope + rope], its rope part rotated; latents [slots, C + rope], one layer's plane; kv_b [H, nope + v, C],
    nope rows first. Returns [T, H * v].
    """
    if plan.single is not None:
        return _decode(q, latents, kv_b, plan.single, scale, nope)
    out = q.new_empty(q.shape[0], kv_b.shape[0] * (kv_b.shape[1] - nope))
    for group in plan.groups:
        out[group.tokens] = _decode(q[group.tokens], latents, kv_b, group, scale, nope)
    for chunk in plan.chunks:
        entries = latents.index_select(0, chunk.slots)
        attend = _expanded if _prefers_expanded(q, kv_b, chunk, nope) else _absorbed
        out[chunk.tokens] = attend(q[chunk.tokens], entries, kv_b, chunk, scale, nope)
    return out


def mla_decode(query: Tensor, latents: Tensor, group: DecodeGroup, scale: float, rank: int) -> Tensor:
    """One token a row, absorbed: query [n, H, C + rope]; returns each head's mixture of latents [n, H, C]."""
    entries = latents.index_select(0, group.slots).view(query.shape[0], group.length, -1)
    scores = torch.baddbmm(group.mask, query, entries.transpose(1, 2), alpha=scale)
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32)
    return torch.bmm(probabilities.to(query.dtype), entries.narrow(2, 0, rank))


def _decode(q: Tensor, latents: Tensor, kv_b: Tensor, group: DecodeGroup, scale: float, nope: int) -> Tensor:
    mixed = mla_decode(_absorb(q, kv_b, nope), latents, group, scale, kv_b.shape[2])
    return _project_values(mixed, kv_b, nope)


def _absorbed(q: Tensor, entries: Tensor, kv_b: Tensor, chunk: Chunk, scale: float, nope: int) -> Tensor:
    """A chunk in the absorbed form: all heads of all its queries against one key."""
    rank = kv_b.shape[2]
    query = _absorb(q, kv_b, nope)
    mixed = query.new_empty(*query.shape[:2], rank)
    for piece in chunk.each_piece():
        keys = entries[: piece.length]
        scores = (query[piece.queries] @ keys.t()).mul_(scale).add_(piece.mask.unsqueeze(1))
        probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        mixed[piece.queries] = probabilities @ keys[:, :rank]
    return _project_values(mixed, kv_b, nope)


def _expanded(q: Tensor, entries: Tensor, kv_b: Tensor, chunk: Chunk, scale: float, nope: int) -> Tensor:
    """A chunk in the expanded form: every head's keys and values are made from the latents first."""
    heads, both, rank = kv_b.shape
    expanded = F.linear(entries[:, :rank], kv_b.view(heads * both, rank)).view(-1, heads, both)
    k_pe = entries[:, None, rank:].expand(-1, heads, -1)
    keys = torch.cat((expanded[..., :nope], k_pe), dim=-1)
    return chunk_attention(q, keys, expanded[..., nope:], chunk, scale)


def _absorb(q: Tensor, kv_b: Tensor, nope: int) -> Tensor:
    """[W_UK^T q_nope | q_pe], [n, H, C + rope]."""
    absorbed = torch.bmm(q.narrow(2, 0, nope).transpose(0, 1), kv_b.narrow(1, 0, nope))
    return torch.cat((absorbed.transpose(0, 1), q.narrow(2, nope, q.shape[2] - nope)), dim=-1)


def _project_values(mixed: Tensor, kv_b: Tensor, nope: int) -> Tensor:
    """W_UV applied to each head's mixture of latents [n, H, C]; returns [n, H * v]."""
    w_uv = kv_b.narrow(1, nope, kv_b.shape[1] - nope)
    return torch.bmm(mixed.transpose(0, 1), w_uv.transpose(1, 2)).transpose(0, 1).flatten(1)


def _prefers_expanded(q: Tensor, kv_b: Tensor, chunk: Chunk, nope: int) -> bool:
    """Compare the multiplications a head that either form takes."""
    both, rank = kv_b.shape[1], kv_b.shape[2]
    rope = q.shape[2] - nope
    queries, length = chunk.tokens.stop - chunk.tokens.start, chunk.slots.shape[0]
    absorbed = queries * both * rank + queries * length * (2 * rank + rope)
    expanded = length * both * rank + queries * length * (both + rope)
    return expanded < absorbed
