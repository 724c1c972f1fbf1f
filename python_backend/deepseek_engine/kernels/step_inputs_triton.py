# mypy: disable-error-code="no-untyped-def"
# Device functions have no types that mypy knows.
"""How a captured step takes its inputs on a GPU: changed numbers are put in place, tokens become embeddings.

    target[index[i]] = value[i]                       index[i] >= 0                 `apply_edits`
    hidden[t] = embedding[last[source[t]]]            source[t] >= 0, else          `embed`
    hidden[t] = embedding[token[t]]

So a step can run before the host knows the tokens that the last one sampled, and a block table is sent by what has
changed in it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_engine.kernels import launcher
from deepseek_engine.kernels.chaining import follow
from deepseek_engine.kernels.dispatch import require
from deepseek_engine.kernels.variants import Kernel, LaunchPlan, Step, Table, Variant


@triton.jit
def apply_edits_kernel(target_ptr, index_ptr, value_ptr, count, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    follow(CHAINED)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(index_ptr + place, mask=place < count, other=-1)
    value = tl.load(value_ptr + place, mask=place < count, other=0)
    tl.store(target_ptr + index.to(tl.int64), value, mask=index >= 0)


@triton.jit
def embed_kernel(
    tokens_ptr, sources_ptr, last_ptr, embedding_ptr, out_ptr, width, BLOCK: tl.constexpr, CHAINED: tl.constexpr
):
    follow(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(sources_ptr + row)
    token = tl.load(tokens_ptr + row)
    last = tl.load(last_ptr + source, mask=source >= 0, other=0)
    token = tl.where(source >= 0, last, token)
    inside = column < width
    x = tl.load(embedding_ptr + token * width + column, mask=inside, other=0.0)
    tl.store(out_ptr + row * width + column, x, mask=inside)


_MODULE = "deepseek_engine.kernels.step_inputs_triton"
APPLY_EDITS = Table(
    Kernel(
        name="apply_edits",
        entry=f"{_MODULE}:apply_edits_kernel",
        signature={"target_ptr": "*i32", "index_ptr": "*i32", "value_ptr": "*i32", "count": "i32"},
        constants=("BLOCK",),
        chained=True,
    ),
    (Variant("apply_edits", "block512", {"BLOCK": 512}, num_warps=4, num_stages=1),),
)
EMBED = Table(
    Kernel(
        name="embed",
        entry=f"{_MODULE}:embed_kernel",
        signature={
            "tokens_ptr": "*i64",
            "sources_ptr": "*i32",
            "last_ptr": "*i64",
            "embedding_ptr": "*T",
            "out_ptr": "*T",
            "width": "i32",
        },
        constants=("BLOCK",),
        divisible=frozenset(("embedding_ptr", "out_ptr", "width")),
        chained=True,
    ),
    (Variant("embed", "block1024", {"BLOCK": 1024}, num_warps=4, num_stages=1),),
)
TABLES = (APPLY_EDITS, EMBED)
PLANS = (
    LaunchPlan("apply_edits", (Step("apply_edits", ("ceil_div(count, BLOCK)",)),)),
    LaunchPlan("embed", (Step("embed", ("tokens", "ceil_div(width, BLOCK)")),)),
)


def apply_edits(target: Tensor, index: Tensor, value: Tensor) -> None:
    """Write int32 `value` [N] to the places `index` int32 [N] of `target`, int32 and contiguous.

    Entries with an index below 0 write nothing; no other index may occur twice.
    """
    dims = {"count": index.shape[0]}
    row = require(APPLY_EDITS, target, dims)
    launcher.launch(
        APPLY_EDITS.kernel,
        row,
        PLANS[0].steps[0].blocks(dims, row),
        {"target_ptr": target, "index_ptr": index, "value_ptr": value, "count": dims["count"]},
    )


def embed(token_ids: Tensor, sources: Tensor, last_tokens: Tensor, embedding: Tensor) -> Tensor:
    """Rows of embedding [V, D], a new [T, D].

    token_ids int64 [T]; sources int32 [T], a place of last_tokens int64 [S] that holds the row's token, or -1.
    """
    dims = {"tokens": token_ids.shape[0], "width": embedding.shape[1]}
    out = torch.empty(dims["tokens"], dims["width"], dtype=embedding.dtype, device=embedding.device)
    row = require(EMBED, embedding, dims)
    launcher.launch(
        EMBED.kernel,
        row,
        PLANS[1].steps[0].blocks(dims, row),
        {
            "tokens_ptr": token_ids,
            "sources_ptr": sources,
            "last_ptr": last_tokens,
            "embedding_ptr": embedding,
            "out_ptr": out,
            "width": dims["width"],
        },
    )
    return out
