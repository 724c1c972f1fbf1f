"""Compiles many rows at once, in processes of their own, into Triton's cache.

A row takes a second or two of one core, and a model needs some forty: one after the other they would be most of a
version's first start. Where this fails, the rows are compiled one by one when they are first launched.

    python -m deepseek_engine.kernels.precompile      reads lines "kernel row dtype architecture" and compiles them
"""

import hashlib
import logging
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from deepseek_engine.kernels.launcher import Row

_log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 300.0
MOST_PROCESSES = 16


def precompile(rows: Iterable[Row], architecture: int) -> None:
    """Have the cache hold the rows; nothing where it does already, by a mark that is left beside its entries."""
    lines = sorted({f"{kernel.name} {variant.name} {dtype} {architecture}" for kernel, variant, dtype in rows})
    mark = _mark(lines)
    if not lines or mark.exists():
        return
    count = min(len(lines), MOST_PROCESSES, len(os.sched_getaffinity(0)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [_python(), "-m", "deepseek_engine.kernels.precompile"]
    processes = []
    try:
        for part in range(count):
            process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env=environment)
            processes.append(process)
            assert process.stdin is not None
            # One that has ended by then reads nothing; its exit code tells.
            with suppress(BrokenPipeError), process.stdin:
                process.stdin.write("\n".join(lines[part::count]))
        failed = sum(process.wait(TIMEOUT_SECONDS) != 0 for process in processes)
    except (OSError, subprocess.TimeoutExpired) as error:
        _log.warning("kernels are compiled one by one: %r", error)
        return
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    if failed:
        _log.warning("%d of %d processes that compile kernels failed; theirs are compiled when needed", failed, count)
        return
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()


def compile_lines(lines: Iterable[str]) -> None:
    """Compile rows that are named as in the module's text; a row that a model made for itself is in no table."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaLauncher

    from deepseek_engine.kernels.catalogue import TABLES
    from deepseek_engine.kernels.launcher import options, source

    known = {(table.kernel.name, row.name): (table.kernel, row) for table in TABLES for row in table.variants}
    for line in lines:
        kernel, name, dtype, architecture = line.split()
        if (kernel, name) not in known:
            continue
        declared, row = known[kernel, name]
        compiled = triton.compile(
            source(declared, row, dtype, int(architecture)),
            target=GPUTarget("cuda", int(architecture), 32),
            options=options(declared, row, int(architecture)),
        )
        if torch.cuda.is_available():
            # The few lines of C that hand a kernel its arguments are compiled too; they need the driver's library.
            CudaLauncher(compiled.src, compiled.metadata)


def _mark(lines: list[str]) -> Path:
    """Named after what decides the binaries: the rows, the kernels' sources and Triton's version."""
    import triton

    digest = hashlib.sha256("\n".join((triton.__version__, *lines)).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return Path(triton.knobs.cache.dir) / f"rows-{digest.hexdigest()[:32]}"


def _python() -> str:
    """This interpreter; a program that only embeds Python names itself as the executable."""
    own = Path(sys.executable or "")
    if own.name.startswith("python"):
        return str(own)
    return str(Path(sysconfig.get_config_var("BINDIR") or sys.prefix) / f"python3.{sys.version_info.minor}")


if __name__ == "__main__":
    compile_lines(sys.stdin.read().split("\n"))
