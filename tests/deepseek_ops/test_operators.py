"""Every operator against its torch reference, over odd sizes, batches and types."""

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from deepseek_engine.kernels.swiglu import swiglu
from deepseek_ops.operators import operators_on
from deepseek_ops.registry import CPU, Operator
from one_node import DTYPES, OneNode, one_node_model, panel_weights
from operator_cases import make_case
from operator_check import check

SEEDS = range(24)
NAMES = [operator.name for operator in operators_on(CPU)]
WITH_OPTIONAL_OUTPUTS = [each for each in operators_on(CPU) if any(output.optional for output in each.outputs)]


@pytest.mark.parametrize("operator", operators_on(CPU), ids=NAMES)
def test_agrees_with_the_reference(library: Path, operator: Operator) -> None:
    for seed in SEEDS:
        case = make_case(operator.name, seed)
        weights = {
            *panel_weights(operator.name, case.inputs),
            *(name for name in ("weight", "kv_b", "down") if name in case.inputs),
        }
        node = OneNode(
            library,
            operator.name,
            case.inputs,
            case.attributes,
            constant=weights if seed % 2 else [],
            shapes=("static", "ranks", "unknown")[seed % 3],
            outputs=case.outputs,
            threads=1 + seed % 2,
        )
        check(operator, case, node.run(case.inputs))


@pytest.mark.parametrize("operator", operators_on(CPU), ids=NAMES)
def test_takes_every_type_of_activations(library: Path, operator: Operator) -> None:
    for name in operator.types.get("T", ()):
        case = make_case(operator.name, 1, DTYPES[name])
        node = OneNode(library, operator.name, case.inputs, case.attributes, outputs=case.outputs)
        check(operator, case, node.run(case.inputs))


@pytest.mark.parametrize("operator", WITH_OPTIONAL_OUTPUTS, ids=lambda operator: operator.name)
def test_an_optional_output_may_stand_there_without_a_name(
    library: Path, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a graph may have it at the end too, where others leave it out."""

    def with_all_outputs(*arguments: Any) -> onnx.ModelProto:
        model = one_node_model(*arguments)
        outputs = model.graph.node[0].output
        outputs.extend([""] * (len(operator.outputs) - len(outputs)))
        return model

    monkeypatch.setattr("one_node.one_node_model", with_all_outputs)
    for seed in range(6):
        case = make_case(operator.name, seed)
        node = OneNode(library, operator.name, case.inputs, case.attributes)
        check(operator, case, node.run(case.inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("outputs", [1, 7, 15, 16, 17, 31, 33, 64])
def test_a_constant_weight_multiplies_as_one_that_is_fed(library: Path, dtype: torch.dtype, outputs: int) -> None:
    """Rows, columns and outputs around the sizes of panels and of their tiles."""
    random = torch.Generator().manual_seed(outputs)
    for columns in (1, 2, 3, 5, 16, 257):
        weight = torch.randn(outputs, columns, generator=random).to(dtype)
        for rows in (*range(1, 15), 31, 600):
            inputs = {"x": torch.randn(rows, columns, generator=random), "weight": weight}
            node = OneNode(library, "DeepSeekMatMul", inputs, constant=["weight"], threads=1 + rows % 2)
            expected = inputs["x"].double() @ weight.double().t()
            assert torch.allclose(node.run(inputs)["y"].double(), expected, rtol=2e-5, atol=2e-5)


def test_an_expert_counts_as_often_as_a_row_chooses_it(library: Path) -> None:
    """Also where as many choices fall on an expert as there are rows, though not one of each."""
    random = torch.Generator().manual_seed(1)
    x, gate_up, down = (torch.randn(shape, generator=random) for shape in ((2, 5), (3, 8, 5), (3, 5, 4)))
    inputs = {"x": x, "weights": torch.tensor([[0.5, 2.0], [1.0, 3.0]]), "gate_up": gate_up, "down": down}
    inputs["experts"] = torch.tensor([[0, 1], [2, 2]], dtype=torch.int32)
    expected = torch.zeros(2, 5)
    for row, (weights, chosen) in enumerate(zip(inputs["weights"], inputs["experts"].tolist(), strict=True)):
        for weight, expert in zip(weights, chosen, strict=True):
            expected[row] += down[expert] @ swiglu(gate_up[expert] @ x[row]) * weight
    node = OneNode(library, "DeepSeekMoE", inputs)
    torch.testing.assert_close(node.run(inputs)["y"], expected)
