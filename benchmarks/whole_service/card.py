"""What nvidia-smi says of the card; nothing where there is none."""

import shutil
import subprocess
from typing import Any


def _ask(*arguments: str) -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        answer = subprocess.run(
            ["nvidia-smi", *arguments, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()] if answer.returncode == 0 else []


def name() -> str:
    """The first card's name, or cpu."""
    found = _ask("--query-gpu=name")
    return found[0] if found else "cpu"


def memory() -> dict[str, Any]:
    """MiB of the first card that are used and that it has, and MiB of each process that it tells of."""
    found = _ask("--query-gpu=memory.used,memory.total")
    if not found:
        return {}
    used, total = (int(part) for part in found[0].split(","))
    return {"used_mib": used, "total_mib": total, "processes": _ask("--query-compute-apps=pid,used_memory")}
