"""Every operator of com.deepseek."""

from deepseek_ops.operators.attention import MLA_PAGED_ATTENTION, PAGED_ATTENTION
from deepseek_ops.operators.elementwise import RMS_NORM, ROTARY_EMBEDDING, SWIGLU
from deepseek_ops.operators.experts import MOE, MOE_GATE, MOE_INT4
from deepseek_ops.operators.linear import MATMUL, MATMUL_FP8_BLOCK, MATMUL_INT4
from deepseek_ops.registry import Operator

OPERATORS: tuple[Operator, ...] = (
    RMS_NORM,
    ROTARY_EMBEDDING,
    SWIGLU,
    MATMUL,
    MATMUL_INT4,
    MATMUL_FP8_BLOCK,
    MLA_PAGED_ATTENTION,
    PAGED_ATTENTION,
    MOE_GATE,
    MOE,
    MOE_INT4,
)
BY_NAME = {operator.name: operator for operator in OPERATORS}
