"""What several rows share."""

from deepseek_ops.registry import Attribute, Input, Tolerance

FLOATS = ("float", "float16", "bfloat16")

# Sums are float32 whatever the type; a half type rounds its inputs the same way on both sides and its output once.
TOLERANCE = {"float": Tolerance(2e-5, 2e-5), "float16": Tolerance(2e-3, 2e-3), "bfloat16": Tolerance(1.6e-2, 1.6e-2)}


def attribute(name: str, doc: str, default: int | float | str | None = None, minimum: int = 1) -> Attribute:
    """One of the type of its default; an integer where that is None."""
    kinds = {float: "float", str: "string"}
    return Attribute(name, kinds.get(type(default), "int"), doc, default, minimum)


def residual(shape: tuple[str, ...]) -> Input:
    return Input("residual", "T", shape, "added to the result", optional=True)
