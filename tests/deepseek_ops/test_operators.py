"""Every operator against its torch reference, over odd sizes, batches and types."""

from pathlib import Path

import pytest
import torch
from deepseek_ops.operators import OPERATORS
from deepseek_ops.registry import Operator
from one_node import DTYPES, OneNode, output_type
from operator_cases import Case, make_case

SEEDS = range(24)
NAMES = [operator.name for operator in OPERATORS]


def check(operator: Operator, case: Case, outputs: dict[str, torch.Tensor]) -> None:
    """The outputs are the reference's within the row's tolerance; integers and written caches are equal."""
    if operator.name == "DeepSeekMoEGate":
        # The reference is in no order.
        for values in (outputs, case.expected):
            order = values["experts"].argsort(-1)
            values["experts"], values["weights"] = (values[key].gather(-1, order) for key in ("experts", "weights"))
    for output in operator.outputs:
        if output.name not in outputs:
            continue
        got, expected = outputs[output.name], case.expected[output.name]
        name = output_type(operator, output.type, case.inputs)
        assert got.dtype == DTYPES[name]
        if output.alias or not got.is_floating_point():
            torch.testing.assert_close(got, expected.to(got.dtype), atol=0, rtol=0)
            continue
        tolerance = operator.tolerance[name]
        torch.testing.assert_close(got.float(), expected.float(), atol=tolerance.absolute, rtol=tolerance.relative)


@pytest.mark.parametrize("operator", OPERATORS, ids=NAMES)
def test_agrees_with_the_reference(library: Path, operator: Operator) -> None:
    for seed in SEEDS:
        case = make_case(operator.name, seed)
        weights = [name for name in ("weight", "kv_b", "gate_up", "down") if name in case.inputs]
        node = OneNode(
            library,
            operator.name,
            case.inputs,
            case.attributes,
            constant=weights if seed % 2 and operator.name != "DeepSeekSwiGLU" else [],
            static=seed % 3 == 0,
            outputs=case.outputs,
            threads=1 + seed % 2,
        )
        check(operator, case, node.run(case.inputs))


@pytest.mark.parametrize("operator", OPERATORS, ids=NAMES)
def test_takes_every_type_of_activations(library: Path, operator: Operator) -> None:
    for name in operator.types.get("T", ()):
        case = make_case(operator.name, 1, DTYPES[name])
        node = OneNode(library, operator.name, case.inputs, case.attributes, outputs=case.outputs)
        check(operator, case, node.run(case.inputs))
