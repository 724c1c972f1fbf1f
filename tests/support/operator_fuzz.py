"""Feeds operators what they do not expect: every call ends in an answer or in an error of the operator's own.

Run as a program, `operator_fuzz.py LIBRARY ROUNDS`, it does so under a sanitizer, which ends the process at the first
byte that is read or written out of bounds. Every operator gets sound inputs too.
"""

import random
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from deepseek_ops.operators import operators_on
from deepseek_ops.registry import CPU
from one_node import OneNode, Shapes, panel_weights
from operator_cases import Case, make_case
from torch import Tensor

_SHAPES: tuple[Shapes, ...] = ("static", "ranks", "unknown")
MOST_DIMENSIONS = 8
EXTREMES = (-(2**63), -(2**31), -1, 0, 1, 2**31, 2**62, 2**63 - 1)


def fuzz(library: Path, name: str, seed: int) -> str:
    """One call with one input spoilt: "ran", or the error's text. Raises what is no error of the operator's own."""
    rng = random.Random(f"fuzz {name} {seed}")
    case = make_case(name, seed)
    spoilt = rng.choice(list(case.inputs))
    change = rng.choice(_CHANGES)
    inputs = {**case.inputs, spoilt: change(rng, case.inputs[spoilt]).contiguous()}
    attributes = dict(case.attributes)
    if attributes and rng.random() < 0.25:
        attribute = rng.choice([key for key, value in attributes.items() if isinstance(value, int)] or ["num_heads"])
        attributes[attribute] = rng.choice((-1, 0, 1, 2, 3, 7, 1 << 24, 1 << 62))
    outputs = {key: list(value.shape) for key, value in case.expected.items() if "cache" not in key}
    try:
        node = OneNode(
            library,
            name,
            inputs,
            attributes,
            constant=panel_weights(name, inputs) if seed % 2 else [],
            shapes=rng.choice(_SHAPES),
            outputs=case.outputs,
        )
        node.run(inputs, outputs)
    except Exception as error:
        return _own(name, error)
    return "ran"


def _own(name: str, error: Exception) -> str:
    text = str(error)
    # The rest is the runtime's: an output bound for another shape, or a type that fits no kernel.
    if (
        f"com.deepseek.{name}, node 'the_node': " in text
        or "shape" in text
        or "Invalid rank for output" in text
        or "imension" in text
        or "Type Error" in text
    ):
        return text
    raise AssertionError(f"{name} failed with {text!r}") from error


def _value(rng: random.Random, tensor: Tensor) -> Tensor:
    changed = tensor.clone().flatten()
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(changed.numel())
        if changed.dtype == torch.int64:
            near = int(changed[place]) + rng.choice((-1, 1))
            changed[place] = rng.choice((*EXTREMES, max(EXTREMES[0], min(EXTREMES[-1], near))))
        elif changed.is_floating_point() and changed.dtype != torch.float8_e4m3fn:
            changed[place] = rng.choice((float("nan"), float("inf"), -float("inf"), 3e38, 0.0))
    return changed.view(tensor.shape)


def _fewer(rng: random.Random, tensor: Tensor) -> Tensor:
    axis = rng.randrange(tensor.dim())
    return tensor.narrow(axis, 0, rng.randrange(tensor.shape[axis]))


def _more(rng: random.Random, tensor: Tensor) -> Tensor:
    axis = rng.randrange(tensor.dim())
    return torch.cat((tensor.view(torch.uint8), tensor.view(torch.uint8)), axis).view(tensor.dtype)


def _rank(rng: random.Random, tensor: Tensor) -> Tensor:
    if tensor.dim() > 1 and rng.random() < 0.3:
        return tensor.flatten()
    return tensor[(None,) * (rng.randint(tensor.dim() + 1, MOST_DIMENSIONS) - tensor.dim())]


def _type(rng: random.Random, tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32).to(
        rng.choice((torch.float64, torch.float16, torch.int32, torch.uint8, torch.int64))
    )


_CHANGES: tuple[Callable[[random.Random, Tensor], Tensor], ...] = (_value, _value, _fewer, _more, _rank, _type)


def sound(library: Path, name: str, seed: int) -> None:
    """One call as it should be, with constant weights every other time."""
    case: Case = make_case(name, seed)
    constant = panel_weights(name, case.inputs) if seed % 2 else []
    OneNode(library, name, case.inputs, case.attributes, constant=constant, outputs=case.outputs, threads=2).run(
        case.inputs
    )


def main() -> None:
    library, rounds = Path(sys.argv[1]), int(sys.argv[2])
    for operator in operators_on(CPU):
        for seed in range(rounds):
            sound(library, operator.name, seed)
            fuzz(library, operator.name, seed)
    print("done")


if __name__ == "__main__":
    main()
