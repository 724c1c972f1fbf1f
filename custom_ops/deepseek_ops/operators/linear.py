"""Products with weights that are read as they are stored: [out, in], as checkpoints have them."""

from deepseek_ops.operators.common import (
    FLOATS,
    GROUP_SIZE,
    ON_CUDA,
    PROVIDERS,
    TOLERANCE,
    WHOLE_BYTES,
    attribute,
    packed_int4,
    residual,
)
from deepseek_ops.registry import CUDA, Input, Operator, Output

_X = Input("x", "T", ("T", "K"), "rows")
_NORM = Input(
    "norm",
    "V",
    ("K",),
    "weight of an RMS norm that the rows of x come through first, as DeepSeekRMSNorm has it",
    optional=True,
    refused={CUDA: "leave it out: normalise with DeepSeekRMSNorm before"},
)
_EPSILON = attribute("epsilon", "of norm", 1e-6)
_OUTPUTS = (Output("y", "T", ("T", "N"), "the product"),)
_REFERENCE = "deepseek_engine.kernels.linear:linear"

MATMUL = Operator(
    name="DeepSeekMatMul",
    kernel="matmul",
    reference=_REFERENCE,
    doc="y = x weight^T + bias + residual with float32 sums. The weight is read once for several rows, in its own type:"
    " a bfloat16 initialiser is not widened first, which halves what a step reads. A session copies a constant weight"
    " into the order in which it is read, once, and reads the initialiser no more: beside a model whose weights are"
    " mapped from its file it takes their size in memory.",
    inputs=(
        _X,
        Input("weight", "W", ("N", "K"), "as stored: [out, in]", panels=True),
        Input("bias", "W", ("N",), "added to every row", optional=True),
        residual(("T", "N")),
        _NORM,
    ),
    outputs=_OUTPUTS,
    attributes=(_EPSILON,),
    types={"T": FLOATS, "W": FLOATS, "V": FLOATS},
    tolerance=TOLERANCE,
    providers=PROVIDERS,
    cuda={**ON_CUDA, "V": "T"},
)

LOGITS = Operator(
    name="DeepSeekLogits",
    kernel="logits",
    reference=_REFERENCE,
    doc="logits = x weight^T as float32, which are rounded to no half type on the way; otherwise as DeepSeekMatMul.",
    inputs=(_X, Input("weight", "W", ("N", "K"), "as stored: [out, in]", panels=True)),
    outputs=(Output("logits", "float", ("T", "N"), "the product"),),
    types={"T": FLOATS, "W": FLOATS},
    tolerance=TOLERANCE,
    providers=PROVIDERS,
    cuda=ON_CUDA,
)

MATMUL_INT4 = Operator(
    name="DeepSeekMatMulInt4",
    kernel="matmul_int4",
    reference="deepseek_engine.kernels.int4_gemm:int4_linear",
    doc="y = x w^T + bias + residual with w[n, k] = (q[n, k] - zero[n, g]) * scale[n, g], g = k // group_size. q is two"
    " values a byte, the even column in the low half.",
    inputs=(
        _X,
        *packed_int4("weight", ("N",), "K"),
        Input("bias", "W", ("N",), "added to every row", optional=True),
        residual(("T", "N")),
        _NORM,
    ),
    outputs=_OUTPUTS,
    attributes=(GROUP_SIZE, _EPSILON),
    types={"T": FLOATS, "W": FLOATS, "V": FLOATS},
    requirements=(WHOLE_BYTES,),
    tolerance=TOLERANCE,
    providers=PROVIDERS,
    cuda={**ON_CUDA, "V": "T"},
)

MATMUL_FP8_BLOCK = Operator(
    name="DeepSeekMatMulFp8Block",
    kernel="matmul_fp8_block",
    reference="deepseek_engine.kernels.fp8_block_gemm:fp8_block_linear",
    doc="y = x w^T + bias + residual with w[n, k] = e4m3(weight[n, k]) * scale_inv[n // block_rows, k //"
    " block_columns], the form of DeepSeek-V3's checkpoints. Activations are not quantised.",
    inputs=(
        _X,
        Input("weight", "F8", ("N", "K"), "e4m3, or its bytes"),
        Input("scale_inv", "float", ("ceil_div(N, block_rows)", "ceil_div(K, block_columns)"), "of the blocks"),
        Input("bias", "W", ("N",), "added to every row", optional=True),
        residual(("T", "N")),
    ),
    outputs=_OUTPUTS,
    attributes=(
        attribute("block_rows", "rows that share a scale", 128),
        attribute("block_columns", "columns that share a scale", 128),
    ),
    types={"T": FLOATS, "W": FLOATS, "F8": ("float8e4m3fn", "uint8")},
    tolerance=TOLERANCE,
    providers=PROVIDERS,
    cuda=ON_CUDA,
)
