"""The CUDA operators on a machine without a GPU: a fake driver records launches, or runs them in Triton's interpreter.

The library is the real one but for three things: its operators are registered for the CPU provider, whose memory stands
for the device's; an image is its own name instead of a binary; and prompts are expanded 32 entries at a time.
"""

import ctypes
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepseek_engine.kernels import catalogue
from deepseek_engine.kernels.variants import DTYPES, Kernel, Variant
from deepseek_ops.build import find_compiler
from deepseek_ops.cuda.build import build_cuda
from deepseek_ops.cuda.cubins import Cubin
from deepseek_ops.cuda.selection import Image
from torch import Tensor

UNPACKED_BYTES = 4096
"""Of packed weights at a time."""
SOURCE = Path(__file__).with_name("fake_cuda.c")
FLAGS = (
    '-DPICCARD_PROVIDER="CPUExecutionProvider"',
    "-DPICCARD_EXPANDED_ENTRIES=32",
    f"-DPICCARD_UNPACKED_BYTES={UNPACKED_BYTES}",
)
_CTYPES = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
_ELEMENTS = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "u8": torch.uint8,
    "i32": torch.int32,
    "i64": torch.int64,
}
_LAUNCHED = ctypes.CFUNCTYPE(
    None,
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_uint),
    ctypes.POINTER(ctypes.c_uint),
    ctypes.c_uint,
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_void_p),
)
_MULTIPLIED = ctypes.CFUNCTYPE(
    None,
    *[ctypes.c_int] * 5,
    *[ctypes.c_void_p] * 2,
    ctypes.c_float,
    ctypes.c_void_p,
    *[ctypes.c_int] * 3,
)
_REAL_16, _REAL_32 = 2, 0


def build_named_images(folder: Path) -> Path:
    """The library for the CPU provider, with names for images."""
    return build_cuda(folder, extra_flags=FLAGS, compile_images=_named)


def _named(images: Sequence[Image], folder: Path) -> list[Cubin]:
    return [Cubin(image.name.encode() + b"\0", "named", 0) for image in images]


def build_fake_cuda(folder: Path) -> Path:
    """The fake driver's library, which is its cuBLAS too."""
    path = folder / "libfake_cuda.so"
    subprocess.run([find_compiler(), "-x", "c", "-shared", "-fPIC", "-O1", str(SOURCE), "-o", str(path)], check=True)
    return path


@dataclass(slots=True)
class Launch:
    """What the driver was asked for."""

    kernel: Kernel
    row: Variant
    dtype: str
    architecture: int
    grid: tuple[int, ...]
    threads: int
    chained: bool
    arguments: dict[str, int | float]


@dataclass(slots=True)
class Multiplication:
    """What cuBLAS was asked for: y [rows, columns] = x [rows, depth] weight + beta * y."""

    rows: int
    columns: int
    depth: int
    beta: float


class FakeCuda:
    """The fake driver of this process. Made before the operators run for the first time.

    Attributes:
        launches, products: since the last `clear`, in order.
    """

    def __init__(self, path: Path, *, interpret: bool = False) -> None:
        os.environ["PICCARD_CUDA_DRIVER"] = os.environ["PICCARD_CUBLAS"] = str(path)
        self._library = ctypes.CDLL(str(path))
        self._interpret = interpret
        self._rows = {(t.kernel.name, row.name): (t.kernel, row) for t in catalogue.TABLES for row in t.variants}
        self.launches: list[Launch] = []
        self.products: list[Multiplication] = []
        self.errors: list[BaseException] = []
        # The library keeps addresses only.
        self._callbacks = _LAUNCHED(self._launched), _MULTIPLIED(self._multiplied)
        self._library.fake_cuda_listen(*self._callbacks)

    def clear(self) -> None:
        self.launches.clear()
        self.products.clear()

    @property
    def loads(self) -> int:
        """Modules loaded so far."""
        return int(self._library.fake_cuda_loads())

    @contextmanager
    def failing(self, call: str, code: int = 2) -> Iterator[None]:
        """Within it a call gives an error."""
        self._library.fake_cuda_fail(call.encode(), code)
        try:
            yield
        finally:
            self._library.fake_cuda_fail(None, 0)

    @contextmanager
    def device(self, *, capturing: bool = False, capability: int = 90, context: bool = True) -> Iterator[None]:
        """Within it the device is another one. A context's capability is asked for once."""
        self._library.fake_cuda_set(int(capturing), capability, int(context))
        try:
            yield
        finally:
            self._library.fake_cuda_set(0, 90, 1)

    def _launched(self, image: bytes, grid: Any, block: Any, shared_bytes: int, chained: int, given: Any) -> None:
        try:
            kernel_name, row_name, dtype, architecture = image.decode().split(".")
            kernel, row = self._rows[kernel_name, row_name]
            arguments = {name: _read(spelled, given[i]) for i, (name, spelled) in enumerate(kernel.signature.items())}
            hidden = [_read("*", given[len(arguments) + i]) for i in range(2)]
            assert hidden == [0, 0]
            launch = Launch(
                kernel,
                row,
                dtype,
                int(architecture.removeprefix("sm_")),
                tuple(grid[:3]),
                block[0],
                bool(chained),
                arguments,
            )
            self.launches.append(launch)
            if self._interpret:
                _interpret(launch)
        except BaseException as error:
            # An exception cannot pass through C.
            self.errors.append(error)

    def _multiplied(
        self,
        transposed: int,
        rows: int,
        columns: int,
        depth: int,
        stride: int,
        x: int,
        weight: int,
        beta: float,
        y: int,
        y_stride: int,
        type: int,
        out: int,
    ) -> None:
        try:
            self.products.append(Multiplication(rows, columns, depth, beta))
            if self._interpret:
                assert transposed == 1
                dtype = torch.float16 if type == _REAL_16 else torch.bfloat16
                out_dtype = torch.float32 if out == _REAL_32 else dtype
                target = _tensor(y, out_dtype, (rows - 1) * y_stride + columns)
                target = target.as_strided((rows, columns), (y_stride, 1))
                given = _tensor(x, dtype, (rows - 1) * stride + depth).as_strided((rows, depth), (stride, 1))
                made = given.float() @ _tensor(weight, dtype, columns, depth).float().t()
                target.copy_(made + beta * target.float() if beta else made)
        except BaseException as error:
            self.errors.append(error)


def _read(spelled: str, place: int) -> int | float:
    kind = ctypes.c_uint64 if spelled.startswith("*") else _CTYPES[spelled]
    return kind.from_address(place).value


def _tensor(address: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """Memory as a tensor."""
    count = int(torch.Size(shape).numel())
    size = count * torch.empty(0, dtype=dtype).element_size()
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype, count=count).view(shape)


def _interpret(launch: Launch) -> None:
    from deepseek_engine.kernels.launcher import constants_of, entry

    values: list[Any] = []
    for name, spelled in launch.kernel.signature.items():
        value = launch.arguments[name]
        if spelled.startswith("*"):
            # The interpreter reads from the address on, whatever the tensor's own size.
            dtype = _ELEMENTS[spelled[1:].replace("T", launch.dtype)]
            values.append(_tensor(int(value), dtype, 1) if value else torch.empty(0, dtype=dtype))
        else:
            values.append(value)
    constants = constants_of(launch.kernel, launch.row, launch.architecture).values()
    entry(launch.kernel.entry)[launch.grid](*values, *constants)


assert set(DTYPES) < set(_ELEMENTS)
