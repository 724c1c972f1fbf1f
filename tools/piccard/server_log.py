"""The server's log, which grows for as long as a server runs: put aside before it fills a disk."""

import os
import shutil
from pathlib import Path

# Bytes above which it is put aside; with what was put aside before it takes twice as much.
LARGEST_LOG = 64 * 2**20


def server_log(home: Path) -> Path:
    """Where a home's server writes."""
    return home / "state" / "logs" / "tritonserver.log"


def put_aside(log: Path, largest: int = LARGEST_LOG) -> bool:
    """Copy the log to `<name>.1` and empty it where it is larger than `largest` bytes; whether it was.

    The server goes on writing into the same file, at its end wherever that is; what it writes between the copy and the
    end of this call is lost.

    Raises:
        OSError: there is no room for the copy; the log stays as it is.
    """
    if not log.exists() or log.stat().st_size <= largest:
        return False
    aside = log.with_name(f"{log.name}.1")
    shutil.copyfile(log, aside)
    os.truncate(log, 0)
    return True
