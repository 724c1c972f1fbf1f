"""How many threads a model computes with on a CPU."""

import os
from pathlib import Path

_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def compute_threads() -> int:
    """All processors that this process may use but one, which serves; OMP_NUM_THREADS overrides it.

    Threads of a parallel loop spin while they wait for one that was not scheduled: as many of them as processors, with
    the server's own threads beside them, made 32 streams on two processors two to three times slower than one thread.
    So does any other busy process: `piccard generate` on two of two busy processors fell from 44 to 3 tokens a second.
    An idle processor brought the demo checkpoint nothing at 8 sequences, whose products are too small to share.
    """
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    if chosen.isdigit() and int(chosen) > 0:
        return int(chosen)
    return max(1, available_processors() - 1)


def available_processors(quota: Path = _CGROUP_QUOTA) -> int:
    """Processors of this process: its affinity, and its control group's quota where that is less."""
    count = len(os.sched_getaffinity(0))
    try:
        limit, period = quota.read_text().split()
        return max(1, min(count, int(limit) // int(period)))
    # Without a quota the file says max; outside of a control group there is none.
    except (OSError, ValueError):
        return count
