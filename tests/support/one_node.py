"""Runs one operator of com.deepseek in ONNX Runtime, on torch tensors whose memory is bound, not copied."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import onnx
import onnxruntime
import torch
from deepseek_ops.operators import BY_NAME
from deepseek_ops.registry import CPU, DOMAIN, ELEMENT_TYPES, Operator
from onnx import TensorProto, helper
from torch import Tensor

DTYPES = {
    "float": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "double": torch.float64,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
    "float8e4m3fn": torch.float8_e4m3fn,
}
Shapes = Literal["static", "ranks", "unknown"]
NUMBERS = {dtype: ELEMENT_TYPES[name] for name, dtype in DTYPES.items()}


class OneNode:
    """A session of one node.

    Args:
        library: the operators' library.
        name: the operator.
        inputs: what it is made for: dtypes and shapes; an optional input that is left out is absent. Sizes stay
            unknown to the session, and with "unknown" the ranks too, unless `shapes` is "static".
        attributes: the node's.
        constant: inputs that are initialisers.
        outputs: which outputs are wanted; all that are not optional by default.
        output_types: instead of those that follow from the inputs.
        provider: whose row of the operator it is. Tensors are bound where they are.
        runs_on: the session's provider, where it is another one.
    """

    def __init__(
        self,
        library: Path,
        name: str,
        inputs: Mapping[str, Tensor],
        attributes: Mapping[str, Any] | None = None,
        *,
        constant: Collection[str] = (),
        shapes: Shapes = "ranks",
        outputs: Sequence[str] | None = None,
        output_types: Mapping[str, int] | None = None,
        threads: int = 1,
        provider: str = CPU,
        runs_on: str | None = None,
        provider_options: Mapping[str, str] | None = None,
    ) -> None:
        self.operator = BY_NAME[name].on(provider)
        self.attributes = dict(attributes or {})
        self.outputs = list(outputs or (each.name for each in self.operator.outputs if not each.optional))
        self._constants = {key: inputs[key] for key in constant}
        model = one_node_model(
            self.operator, inputs, self.attributes, set(constant), shapes, self.outputs, output_types or {}
        )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        # Without an arena a read past an end meets what a sanitizer put there.
        options.enable_cpu_mem_arena = False
        options.log_severity_level = 4
        options.register_custom_ops_library(str(library))
        chosen = runs_on or provider
        if chosen != CPU:
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        self.session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=[(chosen, dict(provider_options or {}))]
        )

    def run(self, inputs: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]] | None = None) -> dict[str, Tensor]:
        """The outputs. One that aliases an input is that input, unless `shapes` gives it memory of its own."""
        binding, outputs = self.bind(inputs, shapes)
        self.session.run_with_iobinding(binding)
        return outputs

    def bind(
        self, inputs: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]] | None = None
    ) -> tuple[onnxruntime.IOBinding, dict[str, Tensor]]:
        """Inputs and new outputs bound to their memory, which has to stay; they have to be contiguous."""
        given = {key: value for key, value in inputs.items() if key not in self._constants}
        outputs = {name: self._output(name, inputs, (shapes or {}).get(name)) for name in self.outputs}
        binding = self.session.io_binding()
        for key, value in given.items():
            assert value.is_contiguous(), key
            binding.bind_input(key, value.device.type, 0, NUMBERS[value.dtype], tuple(value.shape), value.data_ptr())
        for key, value in outputs.items():
            binding.bind_output(key, value.device.type, 0, NUMBERS[value.dtype], tuple(value.shape), value.data_ptr())
        # The binding knows addresses only.
        binding.kept = (given, outputs)
        return binding, outputs

    def _output(self, name: str, inputs: Mapping[str, Tensor], shape: Sequence[int] | None) -> Tensor:
        output = next(each for each in self.operator.outputs if each.name == name)
        if shape is None and output.alias:
            return inputs[output.alias]
        dtype = DTYPES[output_type(self.operator, output.type, inputs)]
        if shape is None:
            sizes = [list(inputs[each.name].shape) if each.name in inputs else None for each in self.operator.inputs]
            shape = self.operator.output_shape(output, self.operator.bind(sizes, self._filled()))
        # Poison shows what was not written.
        poison = 77 if not dtype.is_floating_point else float("nan")
        return torch.full(tuple(shape), poison, dtype=dtype, device=next(iter(inputs.values())).device)

    def _filled(self) -> dict[str, Any]:
        defaults = {each.name: each.default for each in self.operator.attributes if each.default is not None}
        return {**defaults, **self.attributes}


def panel_weights(name: str, inputs: Mapping[str, Tensor]) -> list[str]:
    """The operator's inputs that a session copies into panels where they are constant."""
    return [each.name for each in BY_NAME[name].inputs if each.panels and each.name in inputs]


def output_type(operator: Operator, constraint: str, inputs: Mapping[str, Tensor]) -> str:
    """The element type of an output."""
    if constraint in ELEMENT_TYPES:
        return constraint
    names = {dtype: name for name, dtype in DTYPES.items()}
    return next(
        names[inputs[each.name].dtype] for each in operator.inputs if each.type == constraint and each.name in inputs
    )


def one_node_model(
    operator: Operator,
    inputs: Mapping[str, Tensor],
    attributes: Mapping[str, Any],
    constant: Collection[str],
    shapes: Shapes,
    outputs: Sequence[str],
    output_types: Mapping[str, int],
) -> onnx.ModelProto:
    """The model."""
    names = [each.name if each.name in inputs else "" for each in operator.inputs]
    while names and not names[-1]:
        names.pop()
    wanted = [each.name if each.name in outputs else "" for each in operator.outputs]
    while wanted and not wanted[-1]:
        wanted.pop()
    node = helper.make_node(operator.name, names, wanted, name="the_node", domain=DOMAIN, **attributes)
    graph_inputs = [
        helper.make_tensor_value_info(
            name,
            NUMBERS[inputs[name].dtype],
            _declared(name, inputs[name], shapes),
        )
        for name in names
        if name and name not in constant
    ]
    graph_outputs = []
    for output in operator.outputs:
        if output.name in wanted:
            number = output_types.get(output.name)
            number = number or ELEMENT_TYPES[output_type(operator, output.type, inputs)]
            graph_outputs.append(helper.make_tensor_value_info(output.name, number, [None] * len(output.shape)))
    graph = helper.make_graph(
        [node], "one_node", graph_inputs, graph_outputs, [tensor_proto(name, inputs[name]) for name in constant]
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _declared(name: str, tensor: Tensor, shapes: Shapes) -> list[int] | list[str] | None:
    if shapes == "unknown":
        return None
    return list(tensor.shape) if shapes == "static" else [f"{name}_{axis}" for axis in range(tensor.dim())]


def tensor_proto(name: str, tensor: Tensor) -> TensorProto:
    """A tensor as an initialiser."""
    data = tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return helper.make_tensor(name, NUMBERS[tensor.dtype], list(tensor.shape), data, raw=True)
