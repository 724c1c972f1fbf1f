"""Operators on rows: norm, rotary embedding, activation."""

from deepseek_ops.operators.common import FLOATS, HALVES, ON_CUDA, PROVIDERS, TOLERANCE, attribute
from deepseek_ops.registry import CUDA, Input, Operator, Output, Requirement, Tolerance

_HEADS = attribute("num_heads", "a row is this many heads of one width", 1)

RMS_NORM = Operator(
    name="DeepSeekRMSNorm",
    kernel="rms_norm",
    reference="deepseek_engine.kernels.rms_norm:rms_norm",
    doc="y = weight * cast(s / sqrt(mean(s^2) + epsilon)) with s = x + residual, over the first N columns of every head"
    " of a row; its other columns pass unchanged. The mean is float32. A weight for fewer columns than a head has"
    " normalises the latent beside its rotary key in one go.",
    inputs=(
        Input("x", "T", ("T", "D"), "rows"),
        Input("weight", "W", ("N",), "of the norm"),
        Input("residual", "T", ("T", "D"), "added to x first", optional=True),
    ),
    outputs=(
        Output("y", "T", ("T", "D"), "the normalised rows"),
        Output("sum", "T", ("T", "D"), "x + residual", optional=True),
    ),
    attributes=(attribute("epsilon", "added to the mean square", 1e-6), _HEADS),
    types={"T": FLOATS, "W": FLOATS},
    requirements=(
        Requirement("D // num_heads * num_heads", "D", equal=True),
        Requirement("N", "D // num_heads"),
    ),
    tolerance=TOLERANCE,
    providers=PROVIDERS,
    cuda=ON_CUDA,
)

ROTARY_EMBEDDING = Operator(
    name="DeepSeekRotaryEmbedding",
    kernel="rotary_embedding",
    reference="deepseek_engine.kernels.rope:rotate_pairs_",
    doc="Turns the last 2 * F columns of every head of a row by the angles position * inv_freq, in float32. Pairs are"
    " (2i, 2i + 1) where interleaved, else (i, i + F); the result keeps their places. YaRN and the other ways of"
    " stretching are in inv_freq and scale.",
    inputs=(
        Input("x", "T", ("T", "D"), "rows"),
        Input("positions", "int64", ("T",), "of the rows in their sequences, from 0"),
        Input("inv_freq", "float", ("F",), "angles a position"),
    ),
    outputs=(Output("y", "T", ("T", "D"), "the rotated rows"),),
    attributes=(
        _HEADS,
        attribute("interleaved", "1 for pairs (2i, 2i + 1), 0 for halves", 1, minimum=0),
        attribute("scale", "what cosine and sine are multiplied by", 1.0),
        attribute(
            "max_position_embeddings",
            "positions from here on are refused, on CUDA taken all the same; 0 for no bound",
            0,
            minimum=0,
        ),
    ),
    types={"T": FLOATS},
    requirements=(
        Requirement("D // num_heads * num_heads", "D", equal=True),
        Requirement("2 * F", "D // num_heads"),
        Requirement("interleaved", "1"),
    ),
    tolerance=TOLERANCE,
    providers=PROVIDERS,
    cuda=ON_CUDA,
)

SWIGLU = Operator(
    name="DeepSeekSwiGLU",
    kernel="swiglu",
    reference="deepseek_engine.kernels.swiglu:swiglu",
    doc="silu(gate) * up for rows [gate | up].",
    inputs=(Input("gate_up", "T", ("T", "D"), "rows"),),
    outputs=(Output("y", "T", ("T", "D // 2"), "the activation"),),
    types={"T": FLOATS},
    requirements=(Requirement("D // 2 * 2", "D", equal=True),),
    tolerance=TOLERANCE,
    providers=PROVIDERS,
    cuda=ON_CUDA,
)

EMBEDDING = Operator(
    name="DeepSeekEmbedding",
    kernel="embedding",
    reference="deepseek_engine.kernels.step_inputs_triton:embed",
    doc="y[t] = table[token_ids[t]], or table[last_tokens[sources[t]]] where sources[t] is not below 0: a step can"
    " begin before the host knows the tokens that the last one drew.",
    inputs=(
        Input("token_ids", "int64", ("T",), "of the rows"),
        Input("table", "T", ("V", "D"), "the embedding"),
        Input("sources", "int32", ("T",), "a place of last_tokens that holds the row's token, or below 0"),
        Input("last_tokens", "int64", ("L",), "tokens that were drawn"),
    ),
    outputs=(Output("y", "T", ("T", "D"), "rows of the table"),),
    types={"T": HALVES},
    tolerance={name: Tolerance(0.0, 0.0) for name in HALVES},
    providers=(CUDA,),
)
