"""Compiles rows of the variant tables ahead of time, without a GPU, and reads what the binaries use."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget

from deepseek_engine.kernels.launcher import options, source
from deepseek_engine.kernels.variants import SHARED_MEMORY_LIMITS, Kernel, Variant

WARP_SIZE = 32


@dataclass(frozen=True, slots=True)
class Binary:
    """A compiled row.

    Attributes:
        name: the entry symbol.
        cubin: the binary for one architecture.
        ptx: the text it was assembled from.
        threads: a block's threads.
        shared_bytes: dynamic shared memory a block; above 48 KiB a launcher must raise the function's limit.
        stack_bytes: local memory a thread: spills and arrays that did not fit registers.
        registers: a thread.
    """

    name: str
    architecture: int
    cubin: bytes
    ptx: str
    threads: int
    shared_bytes: int
    stack_bytes: int
    registers: int

    @property
    def uses_wgmma(self) -> bool:
        return "wgmma.mma_async" in self.ptx

    @property
    def copies_asynchronously(self) -> bool:
        return "cp.async" in self.ptx

    def faults(self, variant: Variant) -> list[str]:
        """Where the binary breaks what its row promises; empty if nowhere."""
        found = []
        limit = SHARED_MEMORY_LIMITS[self.architecture]
        if self.shared_bytes > limit:
            found.append(f"uses {self.shared_bytes} bytes of shared memory, sm_{self.architecture} has {limit}")
        if self.stack_bytes > variant.stack_bytes:
            found.append(f"uses {self.stack_bytes} bytes of local memory, the row states {variant.stack_bytes}")
        if self.architecture >= 90 and variant.wide_tiles and not self.uses_wgmma:
            found.append("has tiles of 64 rows and no wgmma")
        return found


def compile_variant(kernel: Kernel, variant: Variant, dtype: str, architecture: int) -> Binary:
    """Compile one row for one architecture. Triton's own cache makes a second call cheap.

    Raises:
        ValueError: the row is not declared for the architecture or the dtype.
    """
    if architecture not in variant.architectures or dtype not in variant.dtypes:
        raise ValueError(f"row {variant.name} of {kernel.name} is not declared for sm_{architecture} and {dtype}")
    target = GPUTarget("cuda", architecture, WARP_SIZE)
    compiled = triton.compile(
        source(kernel, variant, dtype, architecture), target=target, options=options(kernel, variant, architecture)
    )
    registers, stack = _resources(compiled.asm["cubin"])
    return Binary(
        name=compiled.metadata.name,
        architecture=architecture,
        cubin=compiled.asm["cubin"],
        ptx=compiled.asm["ptx"],
        threads=compiled.metadata.num_warps * WARP_SIZE,
        shared_bytes=compiled.metadata.shared,
        stack_bytes=stack,
        registers=registers,
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes a thread, by the cuobjdump that triton's wheel carries. PTX does not show spills."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if match is None:
        raise RuntimeError(f"cuobjdump's resource usage has changed its form: {usage[:200]!r}")
    return int(match[1]), int(match[2])
