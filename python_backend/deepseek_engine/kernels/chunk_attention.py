"""Causal attention of a chunk of queries over its whole context."""

import torch
import torch.nn.functional as F
from torch import Tensor

from deepseek_engine.kernels.attention_plan import Chunk


def chunk_attention(queries: Tensor, keys: Tensor, values: Tensor, chunk: Chunk, scale: float) -> Tensor:
    """softmax(q k^T * scale + mask) v, a head.

    queries [n, H, d]; keys [L, K, d] and values [L, K, v] with L >= n and H a multiple of K: the queries are the last n
    of the L positions, and each key head serves H / K of theirs. Memory is O(PIECE * L), and a piece sees no key beyond
    its own last query. Returns [n, H * v].
    """
    width, value_width = keys.shape[-1], values.shape[-1]
    if value_width < width:
        # The CPU's fused kernel takes keys and values of one width only.
        values = F.pad(values, (0, width - value_width))
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (queries, keys, values))
    grouped = q.shape[1] != k.shape[1]
    outputs = [
        F.scaled_dot_product_attention(
            q[:, :, piece.queries],
            k[:, :, : piece.length],
            v[:, :, : piece.length],
            attn_mask=piece.mask,
            scale=scale,
            enable_gqa=grouped,
        )
        for piece in chunk.each_piece()
    ]
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return out[0, ..., :value_width].transpose(0, 1).flatten(1)
