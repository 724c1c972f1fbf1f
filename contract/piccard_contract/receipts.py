"""How far a router has read the answers of its calls, told to the versions through a memory-mapped file.

A version sends a response only when the router has taken the one before. Without that, the router's process can hang
for ever on server 24.10 (seen, and read in pb_stub.cc and pb_response_iterator.cc, as they also are in 26.07). A thread
that was woken by a response holds the lock of its iterator while it waits for the interpreter's lock. The next response
of the same call makes the thread that hands out responses wait for that iterator, and it holds the lock of all of them.
The thread that holds the interpreter's lock waits for that lock as soon as it begins a call, and nobody moves any more.

Layout: a header of 64 bytes `<8s magic><I pid><I slots>`, then the number of responses taken, a `<Q` a slot.
"""

import mmap
import os
import struct
import threading
from pathlib import Path

MAGIC = b"PICCARDR"
SLOTS = 4096
_HEADER = struct.Struct("<8sII")
_HEADER_SIZE = 64
_COUNT = struct.Struct("<Q")

# What a slot says whose reader is gone before the end: nothing more has to be waited for.
_ALL = 2**64 - 1


def receipts_path(lock: Path) -> Path:
    """The file beside the process lock of a router."""
    return lock.with_suffix(".receipts")


class Receipts:
    """The file of this process, made anew, so that a version which still maps an older one is not misled.

    Args:
        path: the file.
        slots: calls at once that it has room for.
    """

    def __init__(self, path: Path, slots: int = SLOTS) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        size = _HEADER_SIZE + slots * _COUNT.size
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(descriptor, size)
            os.pwrite(descriptor, _HEADER.pack(MAGIC, os.getpid(), slots), 0)
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
        self._lock = threading.Lock()
        self._free = list(range(slots))

    def open(self) -> "Receipt":
        """A receipt for one call; without a slot where all are in use, and then the version does not wait."""
        with self._lock:
            slot = self._free.pop() if self._free else None
        if slot is not None:
            self.write(slot, 0)
        return Receipt(self, slot)

    def write(self, slot: int, count: int) -> None:
        """Say that `count` responses were taken of the call in `slot`."""
        _COUNT.pack_into(self._map, _HEADER_SIZE + slot * _COUNT.size, count)

    def free(self, slot: int) -> None:
        """Let another call have `slot`."""
        with self._lock:
            self._free.append(slot)


class Receipt:
    """How many responses of one call were taken.

    Attributes:
        slot: where the version finds it; None where it has no place.
    """

    def __init__(self, receipts: Receipts, slot: int | None) -> None:
        self.slot = slot
        self._receipts = receipts
        self._count = 0

    def took(self) -> None:
        """One more response was taken."""
        self._count += 1
        if self.slot is not None:
            self._receipts.write(self.slot, self._count)

    def close(self, *, whole: bool) -> None:
        """The call is over; not `whole` where responses may still come, that nobody takes."""
        if self.slot is None:
            return
        if whole:
            self._receipts.free(self.slot)
        else:
            # Not used again: the version may look at it for as long as it sends.
            self._receipts.write(self.slot, _ALL)
        self.slot = None


class ReceiptReader:
    """The files of all routers, as a version reads them. Not for several threads at once."""

    def __init__(self) -> None:
        self._maps: dict[Path, tuple[int, int, mmap.mmap]] = {}

    def taken(self, path: Path, process: int, slot: int) -> int | None:
        """Responses that the router of this file and process has taken of the call in `slot`; None where none tells."""
        known = self._maps.get(path)
        if known is None or known[0] != process:
            known = self._open(path)
            if known is None or known[0] != process:
                return None
        _, slots, mapped = known
        if not 0 <= slot < slots:
            return None
        count: int = _COUNT.unpack_from(mapped, _HEADER_SIZE + slot * _COUNT.size)[0]
        return count

    def _open(self, path: Path) -> tuple[int, int, mmap.mmap] | None:
        """Map the file as it is now: process, slots and the mapping."""
        try:
            with open(path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError):
            return None
        if len(mapped) < _HEADER_SIZE:
            return None
        magic, process, slots = _HEADER.unpack_from(mapped, 0)
        if magic != MAGIC or len(mapped) < _HEADER_SIZE + slots * _COUNT.size:
            return None
        self._maps[path] = process, slots, mapped
        return self._maps[path]
