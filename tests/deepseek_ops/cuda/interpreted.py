"""Runs the operators on a fake driver, their kernels in Triton's interpreter: `interpreted.py LIBRARY DRIVER SEEDS`.

A program of its own, since TRITON_INTERPRET has to be set before a kernel's module is imported. Prints each case that
is right and fails at the first that is not. The device is one for which every kernel has an interpreter.
"""

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

import torch
from cuda_cases import SMALL_CASES, Numbers, run_case
from deepseek_engine.kernels.variants import ADA
from deepseek_ops.registry import CPU, CUDA
from fake_cuda import FakeCuda
from one_node import OneNode


def main() -> None:
    library, driver, seeds = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    cuda = FakeCuda(driver, interpret=True)
    with cuda.device(capability=ADA):
        run_cases(cuda, library, seeds)


def run_cases(cuda: FakeCuda, library: Path, seeds: int) -> None:
    for seed in range(seeds):
        for make in SMALL_CASES:
            case = make(Numbers(torch.float16, seed))
            inputs = case.on(torch.device("cpu"))
            node = OneNode(
                library,
                case.operator,
                inputs,
                case.attributes,
                constant=case.constant,
                outputs=list(case.expected),
                provider=CUDA,
                runs_on=CPU,
            )
            cuda.clear()
            outputs = run_case(node, case, inputs)
            if cuda.errors:
                raise cuda.errors[0]
            errors = case.errors(outputs)
            ran = [launch.kernel.name for launch in cuda.launches] + ["product"] * len(cuda.products)
            print(case.name, {name: f"{error:.1e}" for name, error in errors.items()}, *ran, flush=True)
            assert max(errors.values()) <= case.tolerance(), (case.name, errors)


if __name__ == "__main__":
    main()
