"""Compiles a variant once a device and launches it.

A variant is one binary: types and divisibility come from its kernel's declaration and no argument's value is looked at,
so that nothing is compiled again once every row in use has run once. Under TRITON_INTERPRET=1, set before the first
kernel module is imported, the same rows run in Triton's interpreter.
"""

import importlib
import logging
import threading
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction

from deepseek_engine.kernels.variants import Kernel, Variant

_log = logging.getLogger(__name__)

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

_compiled: dict[tuple[Variant, str, int], Any] = {}
_lock = threading.Lock()


class LaunchError(RuntimeError):
    """An argument breaks what its kernel declares, or the device is none the kernel runs on."""


def source(kernel: Kernel, variant: Variant, dtype: str) -> ASTSource:
    """What Triton compiles for a row, the same ahead of time and just in time."""
    function = entry(kernel.entry)
    signature = {name: spelled.replace("T", dtype) for name, spelled in kernel.signature.items()}
    signature |= dict.fromkeys(kernel.constants, "constexpr")
    if list(signature) != list(function.arg_names):
        raise LaunchError(f"kernel {kernel.name} declares {list(signature)}, {kernel.entry} takes {function.arg_names}")
    order = list(signature)
    attributes = {(order.index(name),): [["tt.divisibility", kernel.alignment(name)]] for name in kernel.divisible}
    constants = {(order.index(name),): variant.constants[name] for name in kernel.constants}
    return ASTSource(function, signature, constants, attributes)


def options(variant: Variant) -> dict[str, Any]:
    return {"num_warps": variant.num_warps, "num_stages": variant.num_stages}


@cache
def entry(path: str) -> Any:
    """The function that "module:function" names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter."""
    return bool(triton.knobs.runtime.interpret)


def capability(device: torch.device) -> int:
    """The device's compute capability, 90 for 9.0. The interpreter stands in for the newest architecture."""
    if interpreting():
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def multiprocessors(device: torch.device) -> int:
    """Of the device; a few in the interpreter, where every program costs."""
    if interpreting():
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


def compilations() -> int:
    """Binaries made or loaded from Triton's cache by this process so far; constant once warm."""
    return len(_compiled)


def launch(
    kernel: Kernel, variant: Variant, blocks: tuple[int, int, int], arguments: Mapping[str, Tensor | int | float]
) -> None:
    """Run a kernel on the current stream of its tensors' device.

    Args:
        kernel, variant: a row of the kernel's table.
        blocks: the grid; nothing happens where one of it is 0.
        arguments: every name of the kernel's signature. Tensors of type "*T" have one dtype.

    Raises:
        LaunchError: a missing argument, a wrong dtype, a pointer or stride that is no multiple of what is declared.
    """
    if 0 in blocks:
        return
    values = [arguments[name] for name in kernel.signature]
    if interpreting():
        _interpret(kernel, variant, blocks, values)
        return
    dtype, device = _kind(kernel, arguments)
    _check_divisible(kernel, arguments)
    compiled = _compiled.get((variant, dtype, device)) or _compile(kernel, variant, dtype, device)
    constants = [variant.constants[name] for name in kernel.constants]
    compiled[blocks](*values, *constants, stream=torch.cuda.current_stream(device).cuda_stream)


def _interpret(kernel: Kernel, variant: Variant, blocks: tuple[int, int, int], values: list[Any]) -> None:
    function = entry(kernel.entry)
    if not isinstance(function, InterpretedFunction):
        raise LaunchError(f"{kernel.entry} was imported before TRITON_INTERPRET was set")
    function[blocks](*values, *(variant.constants[name] for name in kernel.constants))


def _kind(kernel: Kernel, arguments: Mapping[str, Tensor | int | float]) -> tuple[str, int]:
    """The dtype that T stands for and the device's index."""
    dtype, device = "bf16", None
    for name, spelled in kernel.signature.items():
        value = arguments[name]
        if not isinstance(value, Tensor):
            continue
        if device is not None and value.device != device:
            raise LaunchError(f"kernel {kernel.name}: {name} is on {value.device}, other arguments on {device}")
        device = value.device
        if spelled == "*T":
            dtype = DTYPE_NAMES[value.dtype]
    if device is None or device.type != "cuda":
        raise LaunchError(f"kernel {kernel.name} runs on a CUDA device, its arguments are on {device}")
    return dtype, device.index


def _check_divisible(kernel: Kernel, arguments: Mapping[str, Tensor | int | float]) -> None:
    for name in kernel.divisible:
        value = arguments[name]
        number = value.data_ptr() if isinstance(value, Tensor) else value
        if number % kernel.alignment(name):
            raise LaunchError(
                f"kernel {kernel.name}: {name} is declared a multiple of {kernel.alignment(name)} and is {number};"
                " pad the rows or align the buffer"
            )


def _compile(kernel: Kernel, variant: Variant, dtype: str, device: int) -> Any:
    with _lock, torch.cuda.device(device):
        major, minor = torch.cuda.get_device_capability(device)
        target = GPUTarget("cuda", major * 10 + minor, 32)
        compiled = triton.compile(source(kernel, variant, dtype), target=target, options=options(variant))
        _log.debug("compiled %s, row %s, %s for %s", kernel.name, variant.name, dtype, target)
        return _compiled.setdefault((variant, dtype, device), compiled)
