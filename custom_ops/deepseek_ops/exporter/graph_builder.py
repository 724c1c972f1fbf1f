"""Builds a graph node by node, with the signatures of the registry."""

from collections.abc import Mapping

import onnx
from onnx import helper

from deepseek_ops.operators import BY_NAME
from deepseek_ops.registry import DOMAIN, OPSET

ONNX_OPSET = 21


class GraphBuilder:
    """Nodes in order, and the graph's inputs and outputs."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []

    def input(self, name: str, kind: int, *sizes: str | int) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, kind, sizes))
        return name

    def output(self, name: str, kind: int, *sizes: str | int) -> str:
        self.outputs.append(helper.make_tensor_value_info(name, kind, sizes))
        return name

    def deepseek(
        self,
        operator: str,
        node: str,
        inputs: Mapping[str, str | None],
        outputs: Mapping[str, str] | None = None,
        **attributes: int | float | str,
    ) -> list[str]:
        """Add a node of com.deepseek; inputs and outputs by the row's names. Returns the outputs' names.

        Raises:
            ValueError: an input, output or attribute that the operator does not have, or one that it lacks.
        """
        row = BY_NAME[operator]
        given = {name: value for name, value in inputs.items() if value is not None}
        unknown = set(given) - {each.name for each in row.inputs}
        unknown |= set(outputs or {}) - {each.name for each in row.outputs}
        unknown |= set(attributes) - {each.name for each in row.attributes}
        missing = {each.name for each in row.inputs if not each.optional} - set(given)
        missing |= {each.name for each in row.attributes if each.default is None} - set(attributes)
        if unknown or missing:
            raise ValueError(f"{operator}: unknown {sorted(unknown)}, missing {sorted(missing)}")
        named = outputs or {each.name: f"{node}.{each.name}" for each in row.outputs if not each.optional}
        return self._add(
            operator,
            node,
            [given.get(each.name, "") for each in row.inputs],
            [named.get(each.name, "") for each in row.outputs],
            DOMAIN,
            attributes,
        )

    def standard(self, operator: str, node: str, *inputs: str, **attributes: int | float | str) -> str:
        """Add a node of ONNX's own domain; returns its output's name."""
        return self._add(operator, node, list(inputs), [f"{node}.out"], "", attributes)[0]

    def model(self, name: str, initializers: list[onnx.TensorProto]) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, name, self.inputs, self.outputs, initializers)
        opsets = [helper.make_opsetid("", ONNX_OPSET), helper.make_opsetid(DOMAIN, OPSET)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10, producer_name="piccard")

    def _add(
        self,
        operator: str,
        node: str,
        inputs: list[str],
        outputs: list[str],
        domain: str,
        attributes: Mapping[str, int | float | str],
    ) -> list[str]:
        for names in (inputs, outputs):
            while names and not names[-1]:
                names.pop()
        made = helper.make_node(operator, inputs, outputs, name=node, domain=domain)
        made.attribute.extend(helper.make_attribute(key, value) for key, value in sorted(attributes.items()))
        self.nodes.append(made)
        return [name for name in outputs if name]
