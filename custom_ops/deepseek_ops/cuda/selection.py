"""Which kernels, and which rows of their tables, the operators can choose: no other is compiled into the library."""

from collections.abc import Iterator
from dataclasses import dataclass

from deepseek_engine.kernels import catalogue
from deepseek_engine.kernels.variants import Kernel, LaunchPlan, Step, Table, Variant

from deepseek_ops.formula import names_in

_ALL: dict[str, tuple[int, ...]] = {}
KERNELS: dict[str, dict[str, tuple[int, ...]]] = {
    "embed": _ALL,
    "rms_norm": _ALL,
    "add_rms_norm": _ALL,
    "swiglu": _ALL,
    "rotary": _ALL,
    "row_gemv": {"NORM": (0,), "EPILOGUE": (0, 1)},
    "row_gemv_fp32": {"NORM": (0,)},
    "int4_gemv": _ALL,
    "int4_gemm": _ALL,
    "int4_rows": _ALL,
    "int4_any": _ALL,
    "int4_unpack": _ALL,
    "fp8_gemv": _ALL,
    "fp8_gemm": _ALL,
    "fp8_any": _ALL,
    "fp8_unpack": _ALL,
    "sum_parts": _ALL,
    "head_gemm": _ALL,
    "rope_cache": _ALL,
    "mla_schedule": _ALL,
    # Operators read the cache by blocks, never by an explicit list of slots.
    "mla_decode": {"PAGE": (16, 32, 64)},
    "mla_decode_wide": _ALL,
    "mla_merge": _ALL,
    "gather_entries": _ALL,
    "mla_prefill": _ALL,
    "merge_attention": _ALL,
    "grouped_rope_cache": _ALL,
    "grouped_decode": {"PAGE": (16, 32, 64)},
    "grouped_prefill": _ALL,
    "gate_logits": _ALL,
    "gate_choose": _ALL,
    "moe_sort": _ALL,
    "moe_gate_up": _ALL,
    "moe_down": _ALL,
    "moe_combine": _ALL,
    "moe_gate_up_int4": _ALL,
    "moe_down_int4": _ALL,
    "moe_gate_up_int4_rows": _ALL,
    "moe_down_int4_rows": _ALL,
    "moe_few_gate_up": _ALL,
    "moe_few_down": _ALL,
}
"""Kernel to the values that constants of its rows may have."""
TWINS = {
    "mla_decode_wide": "mla_decode",
    "moe_gate_up_int4_rows": "moe_gate_up_int4",
    "moe_down_int4_rows": "moe_down_int4",
}
"""Kernels that are launched in another one's place, with its grid."""


@dataclass(frozen=True, slots=True)
class Selected:
    """A kernel with the rows that are compiled, and the step of a launch plan that launches it."""

    table: Table
    step: Step
    plan: LaunchPlan

    @property
    def kernel(self) -> Kernel:
        return self.table.kernel

    @property
    def rows(self) -> tuple[Variant, ...]:
        return self.table.variants

    @property
    def dimensions(self) -> tuple[str, ...]:
        """What a choice and a grid depend on, the constants left out."""
        named = [name for row in self.rows for name in row.when]
        named += [name for formula in self.step.grid for name in sorted(names_in(formula))]
        return tuple(sorted({name for name in named if name not in self.kernel.constants}))


def selected() -> list[Selected]:
    """Every kernel of KERNELS, in its order.

    Raises:
        KeyError: the catalogue has no such kernel, or no plan launches it.
    """
    tables = {table.kernel.name: table for table in catalogue.TABLES}
    steps: dict[str, tuple[Step, LaunchPlan]] = {}
    for plan in catalogue.PLANS:
        for step in plan.steps:
            # Some are launched by two plans; the first is the one of the kernel's own module.
            steps.setdefault(step.kernel, (step, plan))
    found = []
    for name, wanted in KERNELS.items():
        table = tables[name]
        rows = tuple(row for row in table.variants if _is_wanted(row, wanted))
        step, plan = steps[TWINS.get(name, name)]
        found.append(Selected(Table(table.kernel, rows), step, plan))
    return found


def _is_wanted(row: Variant, wanted: dict[str, tuple[int, ...]]) -> bool:
    return all(row.constants[constant] in values for constant, values in wanted.items())


@dataclass(frozen=True, slots=True)
class Image:
    """One binary of the library: a row for a dtype and an architecture."""

    kernel: Kernel
    row: Variant
    dtype: str
    architecture: int

    @property
    def name(self) -> str:
        return f"{self.kernel.name}.{self.row.name}.{self.dtype}.sm_{self.architecture}"


def images(kernels: list[Selected], architectures: tuple[int, ...]) -> Iterator[Image]:
    """Every binary that the library has; a kernel without types has one for both dtypes."""
    for each in kernels:
        for row in each.rows:
            for architecture in architectures:
                if architecture not in row.architectures:
                    continue
                for dtype in row.dtypes if each.kernel.is_typed else row.dtypes[:1]:
                    yield Image(each.kernel, row, dtype, architecture)
