"""The operators as onnx schemas, with which onnx.checker and onnx.shape_inference know them."""

from functools import partial

import onnx
from onnx import TypeProto, defs
from onnx.shape_inference import InferenceContext

from deepseek_ops.operators import OPERATORS
from deepseek_ops.registry import DOMAIN, ELEMENT_TYPES, Attribute, Input, Operator, Output

_KINDS = {
    "int": defs.OpSchema.AttrType.INT,
    "float": defs.OpSchema.AttrType.FLOAT,
    "string": defs.OpSchema.AttrType.STRING,
}


def register_schemas() -> None:
    """Make onnx know the operators; those that it knows already stay."""
    for operator in OPERATORS:
        if not defs.has(operator.name, DOMAIN):
            schema = _schema(operator)
            schema.set_type_and_shape_inference_function(partial(_infer, operator))
            defs.register_schema(schema)


def _schema(operator: Operator) -> defs.OpSchema:
    return defs.OpSchema(
        operator.name,
        DOMAIN,
        operator.since_version,
        operator.doc,
        inputs=[_parameter(operator, each) for each in operator.inputs],
        outputs=[_parameter(operator, each) for each in operator.outputs],
        type_constraints=_constraints(operator),
        attributes=[_attribute(each) for each in operator.attributes],
    )


def _constraints(operator: Operator) -> list[tuple[str, list[str], str]]:
    """Those of the row, and one for each parameter whose one type depends on the provider."""
    kinds = {each.type: operator.types[each.type] for each in operator.parameters if each.type in operator.types}
    kinds |= {_own(each): operator.accepted_anywhere(each) for each in operator.parameters if _varies(operator, each)}
    return [(name, [f"tensor({kind})" for kind in found], f"of {operator.name}") for name, found in kinds.items()]


def _varies(operator: Operator, parameter: Input | Output) -> bool:
    return parameter.type in ELEMENT_TYPES and len(operator.accepted_anywhere(parameter)) > 1


def _own(parameter: Input | Output) -> str:
    return f"{parameter.name}_type"


def _parameter(operator: Operator, parameter: Input | Output) -> defs.OpSchema.FormalParameter:
    option = defs.OpSchema.FormalParameterOption
    kind = f"tensor({parameter.type})" if parameter.type in ELEMENT_TYPES else parameter.type
    if _varies(operator, parameter):
        kind = _own(parameter)
    return defs.OpSchema.FormalParameter(
        parameter.name, kind, parameter.doc, param_option=option.Optional if parameter.optional else option.Single
    )


def _attribute(attribute: Attribute) -> defs.OpSchema.Attribute:
    if attribute.default is None:
        return defs.OpSchema.Attribute(attribute.name, _KINDS[attribute.kind], attribute.doc, required=True)
    default = onnx.helper.make_attribute(attribute.name, attribute.default)
    return defs.OpSchema.Attribute(attribute.name, default, attribute.doc)


def _infer(operator: Operator, context: InferenceContext) -> None:
    """Raises ShapeError where shapes do not fit, which onnx tells with the node's name."""
    shapes = [_input_shape(context, index) for index in range(len(operator.inputs))]
    values = operator.bind(shapes, _attributes(operator, context))
    for index, output in enumerate(operator.outputs[: context.get_num_outputs()]):
        sizes = operator.output_shape(output, values)
        inferred = onnx.helper.make_tensor_type_proto(_output_type(operator, output, context), sizes)
        context.set_output_type(index, inferred)


def _input_type(context: InferenceContext, index: int) -> TypeProto | None:
    if index >= context.get_num_inputs() or not context.has_input(index):
        return None
    return context.get_input_type(index)


def _input_shape(context: InferenceContext, index: int) -> list[int | None] | None:
    found = _input_type(context, index)
    if found is None or not found.tensor_type.HasField("shape"):
        return None
    return [size.dim_value if size.HasField("dim_value") else None for size in found.tensor_type.shape.dim]


def _output_type(operator: Operator, output: Output, context: InferenceContext) -> int:
    if output.type in ELEMENT_TYPES:
        return ELEMENT_TYPES[output.type]
    for index, parameter in enumerate(operator.inputs):
        found = _input_type(context, index)
        if parameter.type == output.type and found is not None:
            return int(found.tensor_type.elem_type)
    return onnx.TensorProto.UNDEFINED


def _attributes(operator: Operator, context: InferenceContext) -> dict[str, int | float | str]:
    values: dict[str, int | float | str] = {}
    for attribute in operator.attributes:
        found = context.get_attribute(attribute.name)
        if found is not None and found.type:
            values[attribute.name] = onnx.helper.get_attribute_value(found)
        elif attribute.default is not None:
            values[attribute.name] = attribute.default
    return values
