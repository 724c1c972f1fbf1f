"""What an export's graph says without being run: its files, and what its nodes do to the cache."""

from pathlib import Path

import onnx

MODEL_FILE, HEAD_FILE = "model.onnx", "head.onnx"
DOMAIN = "com.deepseek"
OUT = "_out"
"""A cache's output is named as its input, with this after it."""


class ExportError(ValueError):
    """An export that cannot be run; says what to change."""


def check_cache_stays(path: Path) -> None:
    """Whether a graph's cache goes from its input to its output through our operators alone.

    Anything else, such as a Cast, copies all of it in each step.

    Raises:
        ExportError: it does not, or there is no such graph; names the node.
    """
    graph = read_graph(path)
    names = {each.name for each in graph.input}
    caches = {each.name.removesuffix(OUT) for each in graph.output if each.name.endswith(OUT)} & names
    for node in graph.node:
        touched = caches & {*node.input, *(name.removesuffix(OUT) for name in node.output)}
        if touched and node.domain != DOMAIN:
            raise ExportError(
                f"{path}: node {node.name!r}, a {node.op_type}, copies the cache {min(touched)} in each step; publish"
                " the version again"
            )


def check_device(path: Path, *, on_gpu: bool) -> None:
    """Whether a graph was written for a GPU or a CPU, as is wanted: its cache is of a half type or in float32.

    Raises:
        ExportError: it was written for the other.
    """
    graph = read_graph(path)
    outputs = {each.name for each in graph.output}
    kinds = {each.type.tensor_type.elem_type for each in graph.input if f"{each.name}{OUT}" in outputs}
    for_gpu = onnx.TensorProto.FLOAT not in kinds
    if for_gpu and not on_gpu:
        raise ExportError(f"{path} was exported for a GPU; publish with --device cuda, or export in float32")
    if on_gpu and not for_gpu:
        raise ExportError(f"{path} was exported for a CPU; publish with --device cpu, or export in bfloat16")


def read_graph(path: Path) -> onnx.GraphProto:
    """The graph without its weights. Raises ExportError where there is none."""
    try:
        return onnx.load(str(path), load_external_data=False).graph
    except Exception as error:
        raise ExportError(f"{path} cannot be read ({error}); publish the version again") from error
