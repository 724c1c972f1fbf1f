"""Reads the request log on, also over the files that are put aside."""

import os
from contextlib import suppress
from pathlib import Path
from typing import IO


class RequestTail:
    """The lines of the log at `path`, each once.

    Args:
        since: Unix time; files that were written last before it are not read.
    """

    def __init__(self, path: Path, since: float) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._rest = b""
        # The present file first: put aside a moment later, it is still the one that is open.
        self._follow()
        self._older = [file for file in _aside(path) if file.stat().st_mtime >= since and not self._is_open(file)]

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def lines(self) -> list[bytes]:
        """What was written since the last call; at first everything there is, the oldest first."""
        found: list[bytes] = []
        older, self._older = self._older, []
        for path in older:
            # Whatever was put aside may have gone to make room.
            with suppress(FileNotFoundError):
                found += path.read_bytes().splitlines()
        while True:
            found += self._read_on()
            if not self._follow():
                return found

    def _read_on(self) -> list[bytes]:
        if self._file is None:
            return []
        *whole, self._rest = (self._rest + self._file.read()).split(b"\n")
        return whole

    def _follow(self) -> bool:
        """Open the present file where the one that is open is none any more; whether there is more to read."""
        try:
            present = self._path.open("rb")
        except FileNotFoundError:
            return False
        if self._file is not None and os.path.samestat(os.fstat(self._file.fileno()), os.fstat(present.fileno())):
            present.close()
            return False
        if left := self._unread():
            # Written between the last read and the moment at which it was put aside.
            self._rest += left
            present.close()
            return True
        self.close()
        self._file, self._rest = present, b""
        return True

    def _is_open(self, path: Path) -> bool:
        return self._file is not None and os.path.samestat(os.fstat(self._file.fileno()), path.stat())

    def _unread(self) -> bytes:
        return self._file.read() if self._file is not None else b""


def _aside(path: Path) -> list[Path]:
    """The files that were put aside, the oldest first."""
    found = [file for file in path.parent.glob(f"{path.name}.*") if file.suffix[1:].isdigit()]
    return sorted(found, key=lambda file: -int(file.suffix[1:]))
