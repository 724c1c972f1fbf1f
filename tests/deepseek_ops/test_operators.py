"""Every operator against its torch reference, over odd sizes, batches and types."""

from pathlib import Path

import pytest
from deepseek_ops.operators import OPERATORS
from deepseek_ops.registry import Operator
from one_node import DTYPES, OneNode
from operator_cases import make_case
from operator_check import check

SEEDS = range(24)
NAMES = [operator.name for operator in OPERATORS]


@pytest.mark.parametrize("operator", OPERATORS, ids=NAMES)
def test_agrees_with_the_reference(library: Path, operator: Operator) -> None:
    for seed in SEEDS:
        case = make_case(operator.name, seed)
        weights = [name for name in ("weight", "kv_b", "down") if name in case.inputs]
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


@pytest.mark.parametrize("operator", OPERATORS, ids=NAMES)
def test_takes_every_type_of_activations(library: Path, operator: Operator) -> None:
    for name in operator.types.get("T", ()):
        case = make_case(operator.name, 1, DTYPES[name])
        node = OneNode(library, operator.name, case.inputs, case.attributes, outputs=case.outputs)
        check(operator, case, node.run(case.inputs))
