"""What several rows share."""

from collections.abc import Mapping

from deepseek_ops.registry import CPU, CUDA, Attribute, Input, Requirement, Tolerance

FLOATS = ("float", "float16", "bfloat16")
HALVES = ("float16", "bfloat16")
PROVIDERS = (CPU, CUDA)
ON_CUDA: Mapping[str, str | tuple[str, ...]] = {"T": HALVES, "W": "T"}
"""Types on CUDA: the kernels take a half type, and weights of the activations' own."""

# Sums are float32 whatever the type; a half type rounds its inputs the same way on both sides and its output once.
TOLERANCE = {"float": Tolerance(2e-5, 2e-5), "float16": Tolerance(2e-3, 2e-3), "bfloat16": Tolerance(1.6e-2, 1.6e-2)}


def attribute(name: str, doc: str, default: int | float | str | None = None, minimum: int = 1) -> Attribute:
    """One of the type of its default; an integer where that is None."""
    kinds = {float: "float", str: "string"}
    return Attribute(name, kinds.get(type(default), "int"), doc, default, minimum)


def residual(shape: tuple[str, ...]) -> Input:
    return Input("residual", "T", shape, "added to the result", optional=True)


GROUP_SIZE = attribute("group_size", "columns that share a scale; a multiple of 8", 128, minimum=8)
WHOLE_BYTES = Requirement("group_size // 8 * 8", "group_size", equal=True)
"""A group of columns that are packed two a byte begins at a whole one."""


def packed_int4(name: str, rows: tuple[str, ...], columns: str, *, optional: bool = False) -> tuple[Input, ...]:
    """A weight [*rows, columns] of four bits: its values, its scales and its zeros."""
    prefix = "" if name == "weight" else f"{name}_"
    groups = (*rows, f"ceil_div({columns}, group_size)")
    return (
        Input(name, "uint8", (*rows, f"ceil_div({columns}, 2)"), "q, packed", optional=optional),
        Input(f"{prefix}scales", "W", groups, "of the groups", optional=optional),
        Input(f"{prefix}zeros", "uint8", groups, "of the groups, one a byte; 8 if absent", optional=True),
    )
