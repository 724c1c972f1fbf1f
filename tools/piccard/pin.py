"""The pin: one file in a model's folder whose time lies far in the future.

Triton restarts a live version when the newest time within the model's folder grew since the last load; the pin is
that newest time, whatever else is written. A lost pin must not come back while a server runs, since its return is
itself a newer time.
"""

import os
from pathlib import Path

PIN_NAME = ".pin"

# 2037-12-31 00:00:00 UTC; some file systems end in January 2038.
PIN_TIME = 2_145_830_400


def set_pin(model_folder: Path) -> None:
    """Set the pin of a model's folder. Call it only while no server has the model loaded."""
    path = model_folder / PIN_NAME
    if not path.exists():
        path.write_text("Keeps tritonserver from restarting versions; see docs/operations.md.\n", encoding="utf-8")
    os.utime(path, (PIN_TIME, PIN_TIME))


def pin_problem(model_folder: Path) -> str | None:
    """Why the pin of `model_folder` does not hold, or None."""
    path = model_folder / PIN_NAME
    try:
        pinned = path.stat().st_mtime
    except FileNotFoundError:
        return f"{path} is missing"
    if pinned < PIN_TIME:
        return f"{path} has lost its time, which lies in the year 2037"
    newest = max((_newest(entry) for entry in model_folder.iterdir() if entry.name != PIN_NAME), default=0.0)
    if newest >= pinned:
        return f"{path} is not the newest file of its folder"
    return None


def _newest(path: Path) -> float:
    times = [path.lstat().st_mtime]
    if path.is_dir() and not path.is_symlink():
        times += [entry.lstat().st_mtime for entry in path.rglob("*")]
    return max(times)
