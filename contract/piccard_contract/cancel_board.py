"""Cancel tokens on boards: a memory-mapped file of each router, which every version reads.

A cancel is a call of the version. The server gives no call to a version that it unloads, while the version's last
streams run on, for hours where nobody could cancel them: what is retired would be held up by clients who have left.

Layout: a header of 64 bytes `<8s magic><I pid><I slots><Q tokens ever posted>`, then a digest of 16 bytes a slot; a new
one stands over the oldest. Digests, for the file can be read by more than versions and a token can be sent by anyone.
"""

import mmap
import os
import struct
import threading
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

MAGIC = b"PICCARDB"
SLOTS = 1024
SUFFIX = ".cancels"
_HEADER = struct.Struct("<8sII")
_HEADER_SIZE = 64
_COUNT = struct.Struct("<Q")
_COUNT_AT = 16
_DIGEST = 16


def board_path(lock: Path) -> Path:
    """The file beside the process lock of a router."""
    return lock.with_suffix(SUFFIX)


class CancelBoard:
    """The board of this process, made anew.

    Args:
        path: the file.
        slots: tokens that stand on it at once.
    """

    def __init__(self, path: Path, slots: int = SLOTS) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        size = _HEADER_SIZE + slots * _DIGEST
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(descriptor, size)
            os.pwrite(descriptor, _HEADER.pack(MAGIC, os.getpid(), slots), 0)
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
        self._slots = slots
        self._lock = threading.Lock()
        self._count = 0

    def post(self, token: str) -> None:
        """Have whichever version runs the token's generation end it within some 50 ms. Any thread."""
        with self._lock:
            at = _HEADER_SIZE + self._count % self._slots * _DIGEST
            self._map[at : at + _DIGEST] = _digest(token)
            self._count += 1
            _COUNT.pack_into(self._map, _COUNT_AT, self._count)


class BoardReader:
    """The boards of all routers, as a version reads them. Not for several threads at once.

    Args:
        folder: where they are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # By path: which file it was, its mapping and slots, and the tokens that were read of it.
        self._boards: dict[str, tuple[int, mmap.mmap, int, int]] = {}

    def posted(self, tokens: Iterable[str]) -> list[str]:
        """Those of `tokens` that were posted since the last look."""
        new = {digest for path in self._paths() for digest in self._new(path)}
        return [token for token in tokens if _digest(token) in new] if new else []

    def _paths(self) -> list[str]:
        try:
            return [entry.path for entry in os.scandir(self._folder) if entry.name.endswith(SUFFIX)]
        except OSError:
            return []

    def _new(self, path: str) -> list[bytes]:
        try:
            inode = os.stat(path).st_ino
            if path not in self._boards or self._boards[path][0] != inode:
                self._boards[path] = _mapped(path)
        except (OSError, ValueError):
            return []
        inode, mapped, slots, seen = self._boards[path]
        count: int = _COUNT.unpack_from(mapped, _COUNT_AT)[0]
        self._boards[path] = inode, mapped, slots, count
        places = (_HEADER_SIZE + number % slots * _DIGEST for number in range(max(seen, count - slots), count))
        return [mapped[at : at + _DIGEST] for at in places]


def _mapped(path: str) -> tuple[int, mmap.mmap, int, int]:
    """A board of which nothing was read yet. Raises OSError or ValueError where it is none."""
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        inode = os.fstat(file.fileno()).st_ino
    if len(mapped) < _HEADER_SIZE:
        raise ValueError(f"{path} is too short")
    magic, _, slots = _HEADER.unpack_from(mapped, 0)
    if magic != MAGIC or slots < 1 or len(mapped) < _HEADER_SIZE + slots * _DIGEST:
        raise ValueError(f"{path} is no board")
    return inode, mapped, slots, 0


def _digest(token: str) -> bytes:
    return blake2b(token.encode("utf-8", "surrogatepass"), digest_size=_DIGEST).digest()
