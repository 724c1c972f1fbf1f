"""Shared-memory regions of the servers of one home, told by their names' beginning."""

import hashlib
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def home_prefix(home: Path) -> str:
    """What the region names of every server of `home` begin with; no other home's do."""
    return "piccard_" + hashlib.sha256(str(home.resolve()).encode()).hexdigest()[:12]


def server_prefix(home: Path, pid: int) -> str:
    """What the region names of the server that process `pid` starts begin with."""
    return f"{home_prefix(home)}_{pid}_"


def regions(prefix: str) -> list[Path]:
    """Regions whose names begin with `prefix`."""
    if not SHARED_MEMORY.is_dir():
        return []
    return sorted(path for path in SHARED_MEMORY.iterdir() if path.name.startswith(prefix))


def dead_regions(home: Path, living: str | None = None) -> list[Path]:
    """Regions of servers of `home` that are gone.

    Args:
        living: what the names of the running server's regions begin with; None where none runs.
    """
    return [path for path in regions(home_prefix(home)) if living is None or not path.name.startswith(living)]


def remove_regions(paths: list[Path]) -> None:
    """Remove regions; one that is gone already is no error."""
    for path in paths:
        path.unlink(missing_ok=True)
