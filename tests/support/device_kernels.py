"""Where the tests of device kernels run: on a GPU, or in Triton's interpreter in a process of its own.

Triton reads TRITON_INTERPRET when a kernel's module is imported, and ahead-of-time compilation needs it unset: so
`test_interpreter.py` runs their files again in subprocesses, and by themselves they skip without a GPU.
"""

import os

import pytest
import torch
from torch import Tensor

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available() and not INTERPRETING
DEVICE = torch.device("cuda" if ON_GPU else "cpu", 0 if ON_GPU else None)

DTYPES = [torch.bfloat16, torch.float16] if ON_GPU else [torch.float32, torch.float16]
"""The interpreter computes bfloat16 wrongly, and no float32 row is declared for a GPU."""

if INTERPRETING:
    # It needs triton, which a test of its own asks for.
    from quick_interpreter import quicken

    quicken()

needs_device = pytest.mark.skipif(
    not (INTERPRETING or ON_GPU), reason="needs a GPU; test_interpreter.py runs it without"
)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def random(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype).to(DEVICE)


def relative_error(out: Tensor, exact: Tensor) -> float:
    """||out - exact|| / ||exact||, in float64 on the CPU; NaN and infinity never pass a comparison with it."""
    out, exact = out.double().cpu(), exact.double().cpu()
    return float((out - exact).norm() / exact.norm().clamp(min=1e-30))


TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative error of a kernel that rounds its result once or twice to the dtype."""
