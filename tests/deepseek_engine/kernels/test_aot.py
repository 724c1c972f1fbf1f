"""Compiles every declared row for every declared architecture, without a GPU; Triton's cache keeps the binaries."""

import os

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter's functions do not compile", allow_module_level=True)

from deepseek_engine.kernels import aot
from deepseek_engine.kernels.catalogue import PLANS, TABLES
from deepseek_engine.kernels.variants import ARCHITECTURES, HOPPER, Table

KERNELS_WITHOUT_COPIES = {
    "rms_norm",
    "add_rms_norm",
    "rope_cache",
    "rotary",
    "grouped_rope_cache",
    "mla_schedule",
    "mla_merge",
    "merge_attention",
    "gate_choose",
    "moe_sort",
    "moe_combine",
    "moe_few_gate_up",
    "moe_few_down",
    "row_gemv",
    "int4_gemv",
    "int4_any",
    "fp8_gemv",
    "fp8_any",
    "int4_unpack",
    "fp8_unpack",
    "sum_parts",
    "row_gemv_fp32",
    "sample_edit",
    "sample_mass",
    "sample_draw",
    "apply_edits",
    "embed",
    "swiglu",
    "gather_entries",
}
"""Their loads go to registers; every other kernel feeds tensor cores and must copy asynchronously."""
KERNELS_IN_REGISTERS = {"int4_rows", "moe_gate_up_int4_rows", "moe_down_int4_rows"}
"""Of these it is the tensor cores' operands that loads bring."""
ONLY_ON_HOPPER = {"mla_decode_wide", *KERNELS_IN_REGISTERS}
"""Others of the kind stand in for them elsewhere."""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.kernel.name)
def test_every_row_keeps_its_promises(table: Table, architecture: int) -> None:
    rows = [row for row in table.variants if architecture in row.architectures]
    assert bool(rows) == (architecture >= HOPPER or table.kernel.name not in ONLY_ON_HOPPER)
    faults = {}
    for row in rows:
        binary = aot.compile_variant(table.kernel, row, "bf16", architecture)
        found = binary.faults(row)
        if table.kernel.name in KERNELS_IN_REGISTERS:
            if "mma.sync" not in binary.ptx:
                found.append("has no product of tensor cores")
        elif table.kernel.name not in KERNELS_WITHOUT_COPIES and not binary.copies_asynchronously:
            found.append("has no asynchronous copy")
        if ("griddepcontrol.wait" in binary.ptx) != (table.kernel.chained and architecture >= HOPPER):
            found.append("waits for the launch before it where it need not, or does not where it has to")
        if found:
            faults[row.name] = found
    assert not faults


def test_half_precision_compiles_to_another_binary() -> None:
    table = next(table for table in TABLES if table.kernel.name == "rms_norm")
    row = table.variants[0]
    binaries = [aot.compile_variant(table.kernel, row, dtype, HOPPER) for dtype in ("bf16", "fp16")]
    assert binaries[0].cubin != binaries[1].cubin
    assert all(binary.threads == row.num_warps * 32 for binary in binaries)


def test_an_undeclared_architecture_or_dtype_is_refused() -> None:
    table = TABLES[0]
    for dtype, architecture in (("bf16", 75), ("fp32", HOPPER)):
        with pytest.raises(ValueError, match="is not declared for"):
            aot.compile_variant(table.kernel, table.variants[0], dtype, architecture)


def test_names_are_unique_and_plans_name_kernels() -> None:
    names = [table.kernel.name for table in TABLES]
    assert len(names) == len(set(names))
    assert {step.kernel for plan in PLANS for step in plan.steps} <= set(names)
