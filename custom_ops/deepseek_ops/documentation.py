"""docs/custom_ops.md, generated from the registry: `python -m deepseek_ops.documentation FILE` writes it."""

import sys
from collections.abc import Iterable
from pathlib import Path

from deepseek_ops.operators import OPERATORS
from deepseek_ops.registry import CPU, CUDA, DOMAIN, OPSET, Attribute, Input, Operator, Output, Requirement

_HEAD = f"""# Operators for ONNX Runtime

The domain `{DOMAIN}`, opset {OPSET}: what DeepSeek's models need and ONNX does not have. `make custom-ops` builds the
library with the machine's C++ compiler and prints its path, which carries the SHA-256 of what it was made of.
`SessionOptions.register_custom_ops_library(path)` loads it.

What there is: CPU kernels for x86-64 (AVX2, AVX-512, chosen at run time; the variable PICCARD_OPS_ISA asks for a lower
one: generic, avx2) and a portable form for other processors; a second library for GPUs, below. What there is not yet:
packed cache formats. `piccard publish CHECKPOINT --runner onnxruntime` serves a checkpoint with them, on either.

`piccard export CHECKPOINT OUT --quantize int4` packs products and experts for DeepSeekMatMulInt4 and DeepSeekMoEInt4:
in groups of 32 columns, each element rounded to the nearest of 16 steps from a group's least to its largest, 0 among
them, with zeros, and scales in the checkpoint's type, or with `--precision` in that one, for a GPU. The embedding,
norms, biases, gates, kv_b and the head stay as they are. [What that does to the logits](performance.md#int4-exports) is
measured, and [what packed products take on a GPU](performance.md#packed-weights).

A type or shape that is known when a session is made and that an operator does not take fails there, naming operator,
node and constraint; one that is not known fails the run. An attribute of another kind fails the session too; one of
another name ONNX Runtime passes by, and onnx.checker tells it. Sizes are formulas: a bare name that is no attribute is
the same size wherever it stands. No size may be 0. Where a type has a letter before it (T, U, V, W, G, F8), inputs of
one letter have one type.

## On a GPU

`make custom-ops-cuda` builds the library for CUDAExecutionProvider, `deepseek_ops-cuda-<SHA-256>.so`. That takes the
triton package and a C++ compiler, but no GPU: the kernels are the engine's own, in Triton's language, compiled ahead of
time for sm_80, sm_89 and sm_90 by the rows of their variant tables and embedded. The choice of a row, grids and scratch
memory follow the same tables as in the engine. Binaries are kept by what they are made of in the cache folder, so only
the first build takes minutes. `piccard_ops_kernels()` in the library tells what each binary was made of.

The library opens libcuda.so.1 when an operator runs first (PICCARD_CUDA_DRIVER names another file), and cuBLAS, which
ONNX Runtime has loaded, for products of several rows (PICCARD_CUBLAS). A kernel is loaded into a context at its first
use: run shapes once before a graph is captured, as ONNX Runtime does by itself. Launches go to ONNX Runtime's stream.
An operator does not synchronise. Scratch memory comes from the session's arena for the time of a run, in the order of
the stream. What is made once for each stream: cuBLAS's handle with 32 MiB of workspace. Every error of the driver fails
the run and names operator, node, kernel and row.

Activations are float16 or bfloat16 there and weights are of the same type. Inputs marked "in the host's memory" are
bound on the CPU. What lies on the device is not checked: a block, a slot or a position that is out of range reads or
writes where it should not, so whoever fills them answers for them. The attention operators rotate by themselves.

Weights of four bits and e4m3 weights are unpacked on their way into the products, in whole blocks of 32 columns in
groups of 32, 64 or 128, and in blocks of multiples of 128 rows and 128 or a higher power of two of columns with K a
multiple of 16. DeepSeekMatMulInt4 and DeepSeekMatMulFp8Block take any other sizes too, several times slower. From 65
rows on they unpack the weight into scratch memory, up to 128 MiB at a time, and cuBLAS multiplies.

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
        parts += ["Has to hold: " + ", ".join(map(_requirement, operator.requirements)) + ".", ""]
    parts += [f"Since opset {operator.since_version}. {_kernels(operator)}", ""]
    return "\n".join(parts)


def _table(kind: str, rows: Iterable[str]) -> list[str]:
    return [f"| {kind} | type | shape | |", "|---|---|---|---|", *rows, ""]


def _parameter(operator: Operator, parameter: Input | Output) -> str:
    types = ", ".join(operator.accepted(parameter))
    kind = types if parameter.type not in operator.types else f"{parameter.type}: {types}"
    kind += _on_cuda(operator, parameter)
    doc = parameter.doc + _given(operator, parameter)
    if isinstance(parameter, Output) and parameter.alias:
        doc += f" as `{parameter.alias}`"
    return f"| {parameter.name} | {kind} | `[{', '.join(parameter.shape)}]` | {doc} |"


def _on_cuda(operator: Operator, parameter: Input | Output) -> str:
    """The type there, where it is another one."""
    if CPU not in operator.providers or CUDA not in operator.providers:
        return ""
    wanted = operator.cuda.get(parameter.name, operator.cuda.get(parameter.type))
    if wanted is None:
        return ""
    return f"; on CUDA {wanted if isinstance(wanted, str) else ', '.join(wanted)}"


def _given(operator: Operator, parameter: Input | Output) -> str:
    """Whether it may be left out, and where it has to be."""
    if not isinstance(parameter, Input):
        return " (optional)" if parameter.optional else ""
    notes = ["in the host's memory"] if parameter.host else []
    if CPU in parameter.refused and CPU in operator.providers:
        notes.append("on CUDA only" if CUDA in parameter.required else "on CUDA only, optional")
    elif parameter.optional:
        on_cuda = "; not on CUDA" if CUDA in parameter.refused else "; needed on CUDA" * (CUDA in parameter.required)
        notes.append(f"optional{on_cuda}")
    return f" ({'; '.join(notes)})" if notes else ""


def _requirement(requirement: Requirement) -> str:
    where = {None: "", CPU: " on a CPU", CUDA: " on CUDA"}[requirement.provider]
    return f"`{requirement}`{where}"


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
