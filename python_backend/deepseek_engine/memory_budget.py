"""How much memory a version may use, from what its version.yaml says."""

import os
from pathlib import Path

# Of a GPU where version.yaml says nothing: stable and canary live on one card.
DEFAULT_GPU_SHARE = 0.9 / 2
# For the cache alone, on a CPU where version.yaml says nothing; weights are mapped files, which the system can drop.
DEFAULT_CPU_CACHE = 1 << 30

_UNITS = {"MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


class MemoryBudgetError(ValueError):
    """The memory of a version.yaml is not enough; says what to change."""


def memory_bytes(memory: float | str, total: int) -> int:
    """The bytes that `memory` of version.yaml stands for.

    Args:
        memory: a share of the device's memory, or an amount such as 8GiB, as version.yaml allows them.
        total: the device's memory in bytes.
    """
    if isinstance(memory, str):
        return int(float(memory[:-3]) * _UNITS[memory[-3:]])
    return int(memory * total)


def cache_bytes(memory: float | str | None, *, on_gpu: bool, total: int, weights: int) -> int:
    """Bytes for the cache: the budget without the weights.

    Raises:
        MemoryBudgetError: the weights leave nothing.
    """
    if memory is None and not on_gpu:
        return min(DEFAULT_CPU_CACHE, total // 4)
    budget = memory_bytes(DEFAULT_GPU_SHARE if memory is None else memory, total)
    if budget <= weights:
        raise MemoryBudgetError(
            f"version.yaml: memory allows {budget / 2**30:.2f} GiB, but the weights alone take "
            f"{weights / 2**30:.2f} GiB of {total / 2**30:.2f} GiB; raise memory or take a smaller checkpoint"
        )
    return budget - weights


def host_memory() -> int:
    """Bytes of this machine's memory, or of the container's where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(_CGROUP_LIMIT.read_text()))
    # Without a limit the file says max; outside of a control group there is none.
    except (OSError, ValueError):
        return total


def file_bytes(folder: Path, pattern: str) -> int:
    """Bytes of the files of a folder that are named so."""
    return sum(path.stat().st_size for path in folder.glob(pattern))
