"""Attention over a paged cache that is written in place."""

from deepseek_ops.operators.common import FLOATS, TOLERANCE, attribute
from deepseek_ops.registry import Attribute, Input, Operator, Output, Requirement

_CACHE_TYPES = (*FLOATS, "uint8")
_PACKED = (
    "a packed cache, which is not built yet: use a cache of type float, float16 or bfloat16 with cache_format plain"
)
_CACHE_FORMAT = Attribute(
    "cache_format",
    "string",
    "how an entry is stored; plain: its elements in the cache's type",
    "plain",
    choices=("plain", "fp8_ds_mla"),
    refused={"fp8_ds_mla": _PACKED},
)
_BATCH = (
    Input("block_tables", "int64", ("R", "M"), "the blocks of every sequence in order; unused places hold anything"),
    Input("query_starts", "int64", ("R + 1",), "sequence r owns the rows query_starts[r] .. query_starts[r + 1] - 1"),
    Input("context_lengths", "int64", ("R",), "entries of every sequence once this step's are written"),
)
_SCALE = Attribute("scale", "float", "what scores are multiplied by")

MLA_PAGED_ATTENTION = Operator(
    name="DeepSeekMLAPagedAttention",
    kernel="mla_paged_attention",
    reference="deepseek_engine.kernels.mla_attention:mla_attention",
    doc="Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434). Writes the step's entries [latent | rotated key]"
    " to the cache and attends to it, causally, in the absorbed form for few rows and the expanded one for many. The"
    " softmax is float32. A sequence's rows are its last ones. Bind cache_out to the memory of cache: the cache is"
    " written in place and never copied.",
    inputs=(
        Input("q", "T", ("T", "num_heads * (qk_nope_head_dim + qk_rope_head_dim)"), "heads of [nope | rotated rope]"),
        Input("entries", "T", ("T", "C + qk_rope_head_dim"), "what the cache gets: [normalised latent | rotated key]"),
        Input("cache", "U", ("B", "S", "C + qk_rope_head_dim"), "blocks of S entries"),
        Input("kv_b", "W", ("num_heads * (qk_nope_head_dim + v_head_dim)", "C"), "a head's nope rows, then its v rows"),
        *_BATCH,
    ),
    outputs=(
        Output("y", "T", ("T", "num_heads * v_head_dim"), "heads of values"),
        Output("cache_out", "U", ("B", "S", "C + qk_rope_head_dim"), "the same memory", alias="cache"),
    ),
    attributes=(
        attribute("num_heads", "query heads"),
        attribute("qk_nope_head_dim", "columns of a head's query that meet the latent"),
        attribute("qk_rope_head_dim", "columns of a head's query that meet the rotated key"),
        attribute("v_head_dim", "columns of a head's value"),
        _SCALE,
        _CACHE_FORMAT,
    ),
    types={"T": FLOATS, "U": _CACHE_TYPES, "W": FLOATS},
    refused_types={("U", "uint8"): _PACKED},
    requirements=(Requirement("R", "T"),),
    tolerance=TOLERANCE,
)

PAGED_ATTENTION = Operator(
    name="DeepSeekPagedAttention",
    kernel="paged_attention",
    reference="deepseek_engine.kernels.paged_attention:paged_attention",
    doc="Grouped-query attention (arXiv:2305.13245) over paged keys and values, for the Llama- and Qwen-shaped models;"
    " otherwise as DeepSeekMLAPagedAttention.",
    inputs=(
        Input("q", "T", ("T", "num_heads * head_dim"), "rotated"),
        Input("k", "T", ("T", "num_key_value_heads * head_dim"), "rotated; what the key cache gets"),
        Input("v", "T", ("T", "num_key_value_heads * head_dim"), "what the value cache gets"),
        Input("key_cache", "U", ("B", "S", "num_key_value_heads * head_dim"), "blocks of S entries"),
        Input("value_cache", "U", ("B", "S", "num_key_value_heads * head_dim"), "blocks of S entries"),
        *_BATCH,
    ),
    outputs=(
        Output("y", "T", ("T", "num_heads * head_dim"), "heads of values"),
        Output(
            "key_cache_out", "U", ("B", "S", "num_key_value_heads * head_dim"), "the same memory", alias="key_cache"
        ),
        Output(
            "value_cache_out", "U", ("B", "S", "num_key_value_heads * head_dim"), "the same memory", alias="value_cache"
        ),
    ),
    attributes=(
        attribute("num_heads", "query heads"),
        attribute("num_key_value_heads", "key heads; each serves num_heads / num_key_value_heads query heads"),
        attribute("head_dim", "columns of a head"),
        _SCALE,
        _CACHE_FORMAT,
    ),
    types={"T": FLOATS, "U": _CACHE_TYPES},
    refused_types={("U", "uint8"): _PACKED},
    requirements=(
        Requirement("num_heads // num_key_value_heads * num_key_value_heads", "num_heads", equal=True),
        Requirement("R", "T"),
    ),
    tolerance=TOLERANCE,
)
