"""docs/custom_ops.md, generated from the registry: `python -m deepseek_ops.documentation FILE` writes it."""

import sys
from collections.abc import Iterable
from pathlib import Path

from deepseek_ops.operators import OPERATORS
from deepseek_ops.registry import DOMAIN, OPSET, Attribute, Input, Operator, Output

_HEAD = f"""# Operators for ONNX Runtime

The domain `{DOMAIN}`, opset {OPSET}: what DeepSeek's models need and ONNX does not have. `make custom-ops` builds the
library with the machine's C++ compiler and prints its path, which carries the SHA-256 of what it was made of.
`SessionOptions.register_custom_ops_library(path)` loads it.

What there is: CPU kernels for x86-64 (AVX2, AVX-512, chosen at run time; the variable PICCARD_OPS_ISA asks for a lower
one: generic, avx2) and a portable form for other processors. What there is not yet: CUDA kernels, packed cache formats.
`piccard publish CHECKPOINT --runner onnxruntime` serves a checkpoint with them, on a CPU.

`piccard export CHECKPOINT OUT --quantize int4` packs products and experts for DeepSeekMatMulInt4 and DeepSeekMoEInt4:
in groups of 32 columns, each element rounded to the nearest of 16 steps from a group's least to its largest, 0 among
them, with zeros, and scales in the checkpoint's type. The embedding, norms, biases, gates, kv_b and the head stay as
they are. [What that does to the logits](performance.md#int4-exports) is measured.

A type or shape that is known when a session is made and that an operator does not take fails there, naming operator,
node and constraint; one that is not known fails the run. Sizes are formulas: a bare name that is no attribute is the
same size wherever it stands. No size may be 0. T, U and W stand for types; inputs of one letter have one type.

This page is generated from `custom_ops/deepseek_ops/operators/`.
"""


def documentation() -> str:
    """The page."""
    return "\n".join([_HEAD, *(_operator(operator) for operator in OPERATORS)])


def _operator(operator: Operator) -> str:
    parts = [f"## {operator.name}", "", operator.doc, ""]
    parts += _table("input", (_parameter(operator, each) for each in operator.inputs))
    parts += _table("output", (_parameter(operator, each) for each in operator.outputs))
    if operator.attributes:
        parts += ["| attribute | type | default | |", "|---|---|---|---|"]
        parts += [_attribute(each) for each in operator.attributes]
        parts.append("")
    if operator.requirements:
        parts += ["Has to hold: " + ", ".join(f"`{each}`" for each in operator.requirements) + ".", ""]
    parts += [f"Since opset {operator.since_version}. {_kernels(operator)}", ""]
    return "\n".join(parts)


def _table(kind: str, rows: Iterable[str]) -> list[str]:
    return [f"| {kind} | type | shape | |", "|---|---|---|---|", *rows, ""]


def _parameter(operator: Operator, parameter: Input | Output) -> str:
    types = ", ".join(operator.accepted(parameter))
    kind = types if parameter.type not in operator.types else f"{parameter.type}: {types}"
    doc = parameter.doc + (" (optional)" if parameter.optional else "")
    if isinstance(parameter, Output) and parameter.alias:
        doc += f" as `{parameter.alias}`"
    return f"| {parameter.name} | {kind} | `[{', '.join(parameter.shape)}]` | {doc} |"


def _attribute(attribute: Attribute) -> str:
    default = "required" if attribute.default is None else f"`{attribute.default}`"
    doc = attribute.doc
    if attribute.choices:
        built = [choice for choice in attribute.choices if choice not in attribute.refused]
        doc += f": {', '.join(built)}"
        doc += "".join(f"; {choice} is refused for now" for choice in attribute.refused)
    return f"| {attribute.name} | {attribute.kind} | {default} | {doc} |"


def _kernels(operator: Operator) -> str:
    providers = ", ".join(operator.providers)
    tolerances = ", ".join(
        f"{name} {tolerance.absolute:g} + {tolerance.relative:g} |y|" for name, tolerance in operator.tolerance.items()
    )
    return f"{providers}. Compared with `{operator.reference}` within {tolerances}."


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(documentation(), encoding="utf-8")
