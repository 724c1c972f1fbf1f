"""Every operator of com.deepseek."""

from deepseek_ops.operators.attention import MLA_PAGED_ATTENTION, MLA_SCHEDULE, PAGED_ATTENTION, PAGED_SCHEDULE
from deepseek_ops.operators.elementwise import EMBEDDING, RMS_NORM, ROTARY_EMBEDDING, SWIGLU
from deepseek_ops.operators.experts import MOE, MOE_GATE, MOE_INT4
from deepseek_ops.operators.linear import LOGITS, MATMUL, MATMUL_FP8_BLOCK, MATMUL_INT4
from deepseek_ops.registry import Operator

OPERATORS: tuple[Operator, ...] = (
    EMBEDDING,
    RMS_NORM,
    ROTARY_EMBEDDING,
    SWIGLU,
    MATMUL,
    LOGITS,
    MATMUL_INT4,
    MATMUL_FP8_BLOCK,
    MLA_SCHEDULE,
    MLA_PAGED_ATTENTION,
    PAGED_SCHEDULE,
    PAGED_ATTENTION,
    MOE_GATE,
    MOE,
    MOE_INT4,
)


def operators_on(provider: str) -> tuple[Operator, ...]:
    """Those that have a kernel on an execution provider, as they are there."""
    return tuple(operator.on(provider) for operator in OPERATORS if provider in operator.providers)


BY_NAME = {operator.name: operator for operator in OPERATORS}
