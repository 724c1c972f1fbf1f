"""Attention over a paged cache that is written in place."""

from collections.abc import Mapping
from dataclasses import replace

from deepseek_ops.operators.common import FLOATS, HALVES, ON_CUDA, PROVIDERS, TOLERANCE, attribute
from deepseek_ops.registry import CPU, CUDA, Attribute, Input, Operator, Output, Requirement, Tolerance

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
_HEADS = attribute("num_heads", "query heads")
_KEY_HEADS = attribute("num_key_value_heads", "key heads; each serves num_heads / num_key_value_heads query heads")
_HEAD_DIM = attribute("head_dim", "columns of a head")
_ROPE = attribute("qk_rope_head_dim", "columns of a head's query that meet the rotated key")
MOST_WORKERS = 1024
"""Spans into which the decode kernel's work is cut at most: a device has fewer multiprocessors."""
_BATCH = (
    Input("block_tables", "int64", ("N", "M"), "the blocks of every sequence in order; unused places hold anything"),
    Input("query_starts", "int64", ("R + 1",), "sequence r owns the rows query_starts[r] .. query_starts[r + 1] - 1"),
    Input("context_lengths", "int64", ("R",), "entries of every sequence once this step's are written"),
)
_BATCH_ON_CUDA = dict.fromkeys((each.name for each in _BATCH), "int32")
_HOST_BATCH = Input(
    "host_batch",
    "int32",
    ("R", "2"),
    "rows and entries of every sequence, at most, in a captured graph: what launches are planned for",
    host=True,
)
_BY_ITSELF = {CPU: "leave it out: rotate and normalise with DeepSeekRotaryEmbedding and DeepSeekRMSNorm before"}
_UNUSED = {CPU: "leave it out: the batch inputs are read on the host"}


def _on_cuda(name: str, type: str, shape: tuple[str, ...], doc: str, elsewhere: Mapping[str, str]) -> Input:
    """An input that only CUDA takes, where it has to be given."""
    return Input(name, type, shape, doc, optional=True, required=(CUDA,), refused=elsewhere)


def _prepared(name: str, type: str, shape: tuple[str, ...], doc: str) -> Input:
    """What CUDA needs, and a CPU may be given, to normalise and rotate by itself."""
    return Input(name, type, shape, doc, optional=True, required=(CUDA,))


_SCALE = Attribute("scale", "float", "what scores are multiplied by")

_TABLE_ROWS = _on_cuda("table_rows", "int32", ("R",), "the row of block_tables that a sequence reads", _UNUSED)
_POSITIONS = _on_cuda("positions", "int64", ("T",), "of the rows in their sequences, from 0", _BY_ITSELF)
_SLOTS = _on_cuda("slots", "int64", ("T",), "block * S + place of a row's entry; below 0 the row is padding", _UNUSED)
_PLAN = Output("plan", "int32", (f"R + {2 + MOST_WORKERS}",), "for the input of this name")
_PLAN_INPUT = Input(
    "plan", "int32", ("L",), "of DeepSeekMLASchedule; made here if absent", optional=True, refused=_UNUSED
)
_WHOLE_GROUPS = Requirement("num_heads // num_key_value_heads * num_key_value_heads", "num_heads", equal=True)
# Elsewhere table_rows says which row is whose.
_OWN_TABLES = Requirement("N", "R", equal=True, provider=CPU)

MLA_PAGED_ATTENTION = Operator(
    name="DeepSeekMLAPagedAttention",
    kernel="mla_paged_attention",
    reference="deepseek_engine.kernels.mla_attention:mla_attention",
    doc="Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434). Writes the step's entries [latent | rotated key]"
    " to the cache and attends to it, causally, in the absorbed form for few rows and the expanded one for many. The"
    " softmax is float32. A sequence's rows are its last ones. Bind cache_out to the memory of cache: the cache is"
    " written in place and never copied. With positions, rotations and latent_norm (all or none of them; all on CUDA) q"
    " and entries come as their products give them, neither normalised nor rotated. On CUDA sequences of up to 8 rows"
    " stand first; the first longer one and all after it run the expanded form.",
    inputs=(
        Input("q", "T", ("T", "num_heads * (qk_nope_head_dim + qk_rope_head_dim)"), "heads of [nope | rotated rope]"),
        Input("entries", "T", ("T", "C + qk_rope_head_dim"), "what the cache gets: [normalised latent | rotated key]"),
        Input("cache", "U", ("B", "S", "C + qk_rope_head_dim"), "blocks of S entries"),
        Input("kv_b", "W", ("num_heads * (qk_nope_head_dim + v_head_dim)", "C"), "a head's nope rows, then its v rows"),
        *_BATCH,
        _TABLE_ROWS,
        _prepared("positions", "int64", ("T",), "of the rows in their sequences, from 0"),
        _SLOTS,
        _prepared("rotations", "float", ("P", "qk_rope_head_dim"), "cosines, then sines, of the angles of a position"),
        _prepared("latent_norm", "V", ("C",), "weight of the latent's norm"),
        replace(_HOST_BATCH, optional=True, required=(CUDA,), refused=_UNUSED),
        _PLAN_INPUT,
    ),
    outputs=(
        Output("y", "T", ("T", "num_heads * v_head_dim"), "heads of values"),
        Output("cache_out", "U", ("B", "S", "C + qk_rope_head_dim"), "the same memory", alias="cache"),
    ),
    attributes=(
        _HEADS,
        attribute("qk_nope_head_dim", "columns of a head's query that meet the latent"),
        _ROPE,
        attribute("v_head_dim", "columns of a head's value"),
        _SCALE,
        _CACHE_FORMAT,
        attribute("latent_epsilon", "of the latent's norm", 1e-6),
        attribute("interleaved", "1 for rotary pairs (2i, 2i + 1), 0 for halves", 1, minimum=0),
    ),
    types={"T": FLOATS, "U": _CACHE_TYPES, "W": FLOATS, "V": FLOATS},
    refused_types={("U", "uint8"): _PACKED},
    requirements=(
        Requirement("R", "T"),
        _OWN_TABLES,
        Requirement("interleaved", "1"),
        # Columns are turned in pairs.
        Requirement("qk_rope_head_dim // 2 * 2", "qk_rope_head_dim", equal=True),
    ),
    tolerance=TOLERANCE,
    providers=PROVIDERS,
    cuda={**ON_CUDA, "U": "T", "V": "T", **_BATCH_ON_CUDA},
)

MLA_SCHEDULE = Operator(
    name="DeepSeekMLASchedule",
    kernel="mla_schedule",
    reference="deepseek_engine.kernels.mla_decode_triton:DecodePlan",
    doc="How the work of DeepSeekMLAPagedAttention is cut, once for all layers of a step.",
    inputs=(
        Input("cache", "T", ("B", "S", "D"), "of any layer; it is not read"),
        Input("context_lengths", "int32", ("R",), "entries of every sequence"),
        _HOST_BATCH,
    ),
    outputs=(_PLAN,),
    attributes=(_HEADS, _ROPE),
    types={"T": HALVES},
    requirements=(Requirement("qk_rope_head_dim", "D"),),
    tolerance={name: Tolerance(0.0, 0.0) for name in HALVES},
    providers=(CUDA,),
)

PAGED_ATTENTION = Operator(
    name="DeepSeekPagedAttention",
    kernel="paged_attention",
    reference="deepseek_engine.kernels.paged_attention:paged_attention",
    doc="Grouped-query attention (arXiv:2305.13245) over paged keys and values, for the Llama- and Qwen-shaped models;"
    " otherwise as DeepSeekMLAPagedAttention. On CUDA q and k come neither normalised nor rotated.",
    inputs=(
        Input("q", "T", ("T", "num_heads * head_dim"), "rotated"),
        Input("k", "T", ("T", "num_key_value_heads * head_dim"), "rotated; what the key cache gets"),
        Input("v", "T", ("T", "num_key_value_heads * head_dim"), "what the value cache gets"),
        Input("key_cache", "U", ("B", "S", "num_key_value_heads * head_dim"), "blocks of S entries"),
        Input("value_cache", "U", ("B", "S", "num_key_value_heads * head_dim"), "blocks of S entries"),
        *_BATCH,
        _TABLE_ROWS,
        _POSITIONS,
        _SLOTS,
        _on_cuda("rotations", "float", ("P", "head_dim"), "a position's cosines, then its sines", _BY_ITSELF),
        Input("q_norm", "T", ("head_dim",), "of every head, before the rotation", optional=True, refused=_BY_ITSELF),
        Input("k_norm", "T", ("head_dim",), "of every head, before the rotation", optional=True, refused=_BY_ITSELF),
        replace(_HOST_BATCH, optional=True, required=(CUDA,), refused=_UNUSED),
        replace(_PLAN_INPUT, doc="of DeepSeekPagedSchedule; made here if absent"),
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
        _HEADS,
        _KEY_HEADS,
        _HEAD_DIM,
        _SCALE,
        _CACHE_FORMAT,
        attribute("norm_epsilon", "of the norms of queries and keys", 1e-6),
        attribute("interleaved", "1 for rotary pairs (2i, 2i + 1), 0 for halves", 0, minimum=0),
    ),
    types={"T": FLOATS, "U": _CACHE_TYPES},
    refused_types={("U", "uint8"): _PACKED},
    requirements=(_WHOLE_GROUPS, Requirement("R", "T"), _OWN_TABLES, Requirement("interleaved", "1")),
    tolerance=TOLERANCE,
    providers=PROVIDERS,
    cuda={"T": HALVES, "U": "T", **_BATCH_ON_CUDA},
)

PAGED_SCHEDULE = Operator(
    name="DeepSeekPagedSchedule",
    kernel="paged_schedule",
    reference="deepseek_engine.kernels.grouped_decode_triton:GroupedDecodePlan",
    doc="How the work of DeepSeekPagedAttention is cut, once for all layers of a step.",
    inputs=(
        Input("key_cache", "T", ("B", "S", "num_key_value_heads * head_dim"), "of any layer; it is not read"),
        Input("context_lengths", "int32", ("R",), "entries of every sequence"),
        _HOST_BATCH,
    ),
    outputs=(_PLAN,),
    attributes=(_HEADS, _KEY_HEADS, _HEAD_DIM),
    types={"T": HALVES},
    requirements=(_WHOLE_GROUPS,),
    tolerance={name: Tolerance(0.0, 0.0) for name in HALVES},
    providers=(CUDA,),
)
