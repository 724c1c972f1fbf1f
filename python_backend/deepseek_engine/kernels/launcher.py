"""Compiles a variant once a device and launches it.

A variant is one binary: types and divisibility come from its kernel's declaration and no argument's value is looked at,
so that nothing is compiled again once every row in use has run once. Under TRITON_INTERPRET=1, set before the first
kernel module is imported, the same rows run in Triton's interpreter.
"""

import importlib
import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.interpreter import InterpretedFunction

from deepseek_engine.kernels.variants import HOPPER, Kernel, Variant

_log = logging.getLogger(__name__)

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

Row = tuple[Kernel, Variant, str]
"""What one binary is made of: a kernel, a row of its table, a dtype."""

_recording: dict[Row, None] | None = None
_compiled: dict[tuple[Variant, str, int], tuple[Any, list[int]]] = {}
_lock = threading.Lock()


class LaunchError(RuntimeError):
    """An argument breaks what its kernel declares, or the device is none the kernel runs on."""


def source(kernel: Kernel, variant: Variant, dtype: str, architecture: int) -> ASTSource:
    """What Triton compiles for a row, the same ahead of time and just in time."""
    function = entry(kernel.entry)
    signature = {name: spelled.replace("T", dtype) for name, spelled in kernel.signature.items()}
    constexprs = constants_of(kernel, variant, architecture)
    signature |= dict.fromkeys(constexprs, "constexpr")
    if list(signature) != list(function.arg_names):
        raise LaunchError(f"kernel {kernel.name} declares {list(signature)}, {kernel.entry} takes {function.arg_names}")
    order = list(signature)
    # In the signature's order: caches know a binary by the text of this, and a set's order is another in each process.
    divisible = [name for name in order if name in kernel.divisible]
    attributes = {(order.index(name),): [["tt.divisibility", kernel.alignment(name)]] for name in divisible}
    constants = {(order.index(name),): value for name, value in constexprs.items()}
    kind = GluonASTSource if function.is_gluon() else ASTSource
    return kind(function, signature, constants, attributes)


def constants_of(kernel: Kernel, variant: Variant, architecture: int) -> dict[str, int]:
    """Every constexpr parameter in the function's order."""
    constants = {name: variant.constants[name] for name in kernel.constants}
    if kernel.chained:
        constants["CHAINED"] = int(architecture >= HOPPER and not interpreting())
    return constants


def options(kernel: Kernel, variant: Variant, architecture: int) -> dict[str, Any]:
    """What a row is compiled with."""
    chained = kernel.chained and architecture >= HOPPER
    return {"num_warps": variant.num_warps, "num_stages": variant.num_stages, "launch_pdl": chained}


@cache
def entry(path: str) -> Any:
    """The function that "module:function" names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


_INTERPRETING = bool(triton.knobs.runtime.interpret)


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter."""
    return _INTERPRETING


@cache
def capability(device: torch.device) -> int:
    """The device's compute capability, 90 for 9.0. The interpreter stands in for the newest architecture."""
    if interpreting():
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


@cache
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
    if interpreting():
        _interpret(kernel, variant, blocks, [arguments[name] for name in kernel.signature])
        return
    values, dtype, device = _checked(kernel, arguments)
    if _recording is not None:
        _recording[kernel, variant, dtype] = None
        return
    compiled, constants = _compiled.get((variant, dtype, device)) or _compile(kernel, variant, dtype, device)
    compiled[blocks](*values, *constants, stream=torch.cuda.current_stream(device).cuda_stream)


@contextmanager
def recording() -> Iterator[dict[Row, None]]:
    """Within it nothing is launched: the rows that would be are collected, in order, so that they can be compiled.

    Of the process's launches, so no other thread may launch meanwhile.
    """
    global _recording
    rows: dict[Row, None] = {}
    _recording = rows
    try:
        yield rows
    finally:
        _recording = None


def _interpret(kernel: Kernel, variant: Variant, blocks: tuple[int, int, int], values: list[Any]) -> None:
    function = entry(kernel.entry)
    if not isinstance(function, InterpretedFunction):
        raise LaunchError(f"{kernel.entry} was imported before TRITON_INTERPRET was set")
    function[blocks](*values, *constants_of(kernel, variant, 90).values())


@cache
def _arguments(kernel: Kernel) -> tuple[tuple[str, bool, int], ...]:
    """Each argument's name, whether its dtype is T, and what it is a multiple of, or 0."""
    return tuple(
        (name, spelled == "*T", kernel.alignment(name) if name in kernel.divisible else 0)
        for name, spelled in kernel.signature.items()
    )


def _checked(kernel: Kernel, arguments: Mapping[str, Tensor | int | float]) -> tuple[list[Any], str, int]:
    """The arguments in order, the dtype that T stands for, and the device's index. Every launch goes through it."""
    values: list[Any] = []
    dtype: torch.dtype | None = None
    device = -1
    for name, typed, alignment in _arguments(kernel):
        value = arguments[name]
        values.append(value)
        number: Any = value
        if isinstance(value, Tensor):
            index = value.get_device()
            if index < 0 or device not in (-1, index):
                raise LaunchError(
                    f"kernel {kernel.name} runs on one CUDA device: {name} is on {value.device}, others on {device}"
                )
            device = index
            number = value.data_ptr() if alignment else 0
            if typed:
                dtype = value.dtype
        if alignment and number % alignment:
            raise LaunchError(
                f"kernel {kernel.name}: {name} is declared a multiple of {alignment} and is {number};"
                " pad the rows or align the buffer"
            )
    if device < 0:
        raise LaunchError(f"kernel {kernel.name} has no tensor among its arguments")
    return values, "bf16" if dtype is None else DTYPE_NAMES[dtype], device


def _compile(kernel: Kernel, variant: Variant, dtype: str, device: int) -> tuple[Any, list[int]]:
    with _lock, torch.cuda.device(device):
        architecture = capability(torch.device("cuda", device))
        target = GPUTarget("cuda", architecture, 32)
        compiled = triton.compile(
            source(kernel, variant, dtype, architecture),
            target=target,
            options=options(kernel, variant, architecture),
        )
        _log.debug("compiled %s, row %s, %s for %s", kernel.name, variant.name, dtype, target)
        constants = list(constants_of(kernel, variant, architecture).values())
        return _compiled.setdefault((variant, dtype, device), (compiled, constants))
