"""What the operators of an export do at once, read from its graphs."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx

from deepseek_engine.runners.onnx_graph import DOMAIN, HEAD_FILE, MODEL_FILE, read_graph

_GATE = "DeepSeekMoEGate"
# Packed forms have names that begin so.
_PRODUCT, _EXPERTS = "DeepSeekMatMul", "DeepSeekMoE"


@dataclass(frozen=True, slots=True)
class ExportedOperators:
    """The operators of an export.

    Attributes:
        nodes: how often each com.deepseek operator stands in body and head.
        fused: operators of the models' formulas, by their names in `gpu.fusions.step_operators`, that share a node with
            others; each as often as it does.
        provider: what they were written for.
    """

    nodes: Mapping[str, int]
    fused: Mapping[str, int]
    provider: str


def exported_operators(folder: Path) -> ExportedOperators:
    """Of the export in a folder. Raises ExportError where its graphs cannot be read."""
    body, head = (read_graph(folder / name) for name in (MODEL_FILE, HEAD_FILE))
    # Numbers on the host decide the launches of operators on a GPU alone.
    on_gpu = any(each.name == "host_batch" for each in body.input)
    return ExportedOperators(
        nodes=Counter(node.op_type for graph in (body, head) for node in _ours(graph)),
        fused=_fused(_ours(body), on_gpu=on_gpu),
        provider="CUDAExecutionProvider" if on_gpu else "CPUExecutionProvider",
    )


def _ours(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    return [node for node in graph.node if node.domain == DOMAIN]


def _fused(nodes: Iterable[onnx.NodeProto], *, on_gpu: bool) -> Counter[str]:
    activated = {node.input[0] for node in nodes if node.op_type == "DeepSeekSwiGLU"}
    gates = {node.output[1]: node for node in nodes if node.op_type == _GATE}
    found: Counter[str] = Counter()
    for node in nodes:
        kind = node.op_type
        if kind == "DeepSeekRMSNorm" and len(node.output) > 1:
            found.update(("residual addition", "norm"))
        elif kind == "DeepSeekSwiGLU":
            found.update(("SiLU of dense layers", "SiLU times up of dense layers"))
        elif kind == "DeepSeekMLAPagedAttention" and "rotations" in node.input:
            found.update(("latent norm", "rotation of queries", "rotation of the key", "cache write"))
        elif kind == "DeepSeekPagedAttention" and "rotations" in node.input:
            found.update(("rotation of queries", "rotation of keys", "cache write"))
            if _reads(node, "q_norm.weight"):
                found.update(("norm of queries", "norm of keys"))
        elif kind == _GATE:
            found.update(_of_gate(node))
        elif kind.startswith(_EXPERTS):
            found.update(_of_experts(node, gates[node.input[2]], on_gpu=on_gpu))
        elif kind.startswith(_PRODUCT) and node.output[0] in activated:
            found.update(("gate product", "up product"))
    return found


def _of_gate(node: onnx.NodeProto) -> list[str]:
    attributes = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    found = ["scores", "top-k", "weights"]
    if attributes["topk_method"] != b"greedy":
        found.append("choice of groups")
    if attributes.get("n_shared_experts", 0):
        found.append("shared experts among the choices")
    return found


def _of_experts(node: onnx.NodeProto, gate: onnx.NodeProto, *, on_gpu: bool) -> list[str]:
    found = ["gate product of the experts", "up product of the experts", "SiLU", "SiLU times up"]
    found += ["weighting", "sum over the experts"]
    if not on_gpu:
        found.append("down product of the experts")
    among = "shared experts among the choices"
    if among in _of_gate(gate):
        found.append("addition of the shared experts")
    # On a CPU they are weights of their own, which every row runs.
    elif _reads(node, "shared_experts.gate_up"):
        found += [among, "addition of the shared experts"]
    return found


def _reads(node: onnx.NodeProto, weight: str) -> bool:
    return any(name.endswith(weight) for name in node.input)
