"""Tells when a file has changed, by one stat a look."""

import os
import time
from pathlib import Path

# Time stamps of files have a granularity of some milliseconds: two writes within it can look like one. A file that was
# written less than this many seconds before a look counts as changed at the next look too.
SETTLED = 0.1

Signature = tuple[int, int, int]


class FileWatch:
    """One file. Not for several threads at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: Signature | None = None
        self._settled = False

    def changed(self) -> bool:
        """Whether the file may differ from what it was at the last look; True at the first."""
        signature = self.signature()
        if signature == self._seen and self._settled:
            return False
        self._seen = signature
        self._settled = signature is None or time.time() - signature[0] / 1e9 > SETTLED
        return True

    def signature(self) -> Signature | None:
        """Time of the last change in nanoseconds, inode and size; None where there is no such file."""
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size
