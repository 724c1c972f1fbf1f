"""Compares operators with their references; as a program, `operator_check.py LIBRARY SEEDS`, in its own process."""

import ctypes
import sys
from pathlib import Path

import torch
from deepseek_ops.operators import operators_on
from deepseek_ops.registry import CPU, Operator
from one_node import DTYPES, OneNode, output_type, panel_weights
from operator_cases import Case, make_case
from torch import Tensor


def check(operator: Operator, case: Case, outputs: dict[str, Tensor]) -> None:
    """The outputs are the reference's within the row's tolerance; integers and written caches are equal."""
    if operator.name == "DeepSeekMoEGate":
        # The reference is in no order.
        for values in (outputs, case.expected):
            order = values["experts"].argsort(-1)
            values["experts"], values["weights"] = (values[key].gather(-1, order) for key in ("experts", "weights"))
        padded = (case.expected["experts"] < 0).all(-1)
        outputs["weights"][padded] = case.expected["weights"][padded]
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


def instruction_set(library: Path) -> str:
    """The loops that the library runs in this process."""
    chosen = ctypes.CDLL(str(library)).piccard_ops_isa
    chosen.restype = ctypes.c_char_p
    return str(chosen().decode())


def main() -> None:
    library, seeds = Path(sys.argv[1]), int(sys.argv[2])
    for operator in operators_on(CPU):
        for seed in range(seeds):
            case = make_case(operator.name, seed)
            constant = panel_weights(case.name, case.inputs) if seed % 2 else []
            node = OneNode(library, case.name, case.inputs, case.attributes, constant=constant, outputs=case.outputs)
            check(operator, case, node.run(case.inputs))
    print(instruction_set(library))


if __name__ == "__main__":
    main()
