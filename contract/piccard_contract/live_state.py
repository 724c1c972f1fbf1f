"""The state file of a running service: one memory-mapped file, one writer a section, any number of readers.

Layout: a header of 4,096 bytes (magic, section count, section size), then sections of equal size. A section has a
header `<64s owner><I pid><I length><I crc32><Q sequence><d unix time>` and a JSON payload. A writer writes the payload
and then the header; a reader takes a payload only when its checksum fits, and looks again when it does not, so no
lock is needed. A section is worth what its owner is: `Section.alive` says whether the owner's process lock is held.
"""

import fcntl
import json
import mmap
import os
import struct
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from piccard_contract.process_lock import holder_pid, is_held

MAGIC = b"PICCARD1"
HEADER_SIZE = 4096
SECTION_COUNT = 128
SECTION_SIZE = 64 * 1024
_FILE_HEADER = struct.Struct("<8sII")
_SECTION_HEADER = struct.Struct("<64sIIIQd")
MAX_PAYLOAD = SECTION_SIZE - _SECTION_HEADER.size

# Seconds that a reader waits for a writer that lives and is in the middle of a report. It needs microseconds, unless it
# has to wait for a processor just then; without patience a busy machine would make its version look gone.
READ_PATIENCE = 1.0


class LiveStateError(RuntimeError):
    """The file is not a state file, or has no room."""


@dataclass(frozen=True, slots=True)
class Section:
    """What one owner published last.

    Attributes:
        owner: such as version-2, router, router_unary, admission or supervisor.
        pid: the process that wrote it.
        updated_at: Unix time in seconds.
        alive: whether that very process holds the owner's lock.
    """

    owner: str
    pid: int
    updated_at: float
    alive: bool
    data: dict[str, Any]


class LiveState:
    """The state file at `path`, made where it is missing.

    Args:
        path: the file.
        run_folder: folder of the process locks, one `<owner>.lock` a section.
    """

    def __init__(self, path: Path, run_folder: Path) -> None:
        self.path = path
        self.run_folder = run_folder
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            size = HEADER_SIZE + SECTION_COUNT * SECTION_SIZE
            if os.fstat(descriptor).st_size == 0:
                os.ftruncate(descriptor, size)
                os.pwrite(descriptor, _FILE_HEADER.pack(MAGIC, SECTION_COUNT, SECTION_SIZE), 0)
            header = os.pread(descriptor, _FILE_HEADER.size, 0)
            if header != _FILE_HEADER.pack(MAGIC, SECTION_COUNT, SECTION_SIZE):
                raise LiveStateError(f"{path} is not a state file of this Piccard; stop the server and delete it")
            self._map = mmap.mmap(descriptor, size)
        finally:
            # mmap keeps a duplicate of the descriptor, so that closing it alone would not end the lock.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def close(self) -> None:
        """Unmap the file; writers of it end too."""
        self._map.close()

    def writer(self, owner: str) -> "SectionWriter":
        """The section of `owner`, whose process lock the caller holds.

        Raises:
            LiveStateError: every section belongs to a living process.
        """
        name = owner.encode("ascii")
        if not 0 < len(name) <= 64:
            raise LiveStateError(f"owner {owner!r} must have 1 to 64 characters")
        with open(self.path, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            offset = self._place(name)
            _SECTION_HEADER.pack_into(self._map, offset, name, os.getpid(), 0, 0, 0, time.time())
        return SectionWriter(self._map, offset, name)

    def clear(self, owner: str) -> bool:
        """Free the section of an owner that is gone for good; whether it had one.

        Raises:
            LiveStateError: its process lives.
        """
        with open(self.path, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for index in range(SECTION_COUNT):
                offset = self._offset(index)
                if self._owner(offset) != owner:
                    continue
                if is_held(self.run_folder / f"{owner}.lock"):
                    raise LiveStateError(f"{owner} lives; its section is its own")
                self._map[offset : offset + _SECTION_HEADER.size] = bytes(_SECTION_HEADER.size)
                return True
        return False

    def read(self, owner: str) -> Section | None:
        """What `owner` published last, or None where it never did."""
        for index in range(SECTION_COUNT):
            offset = self._offset(index)
            if self._owner(offset) == owner:
                return self._section(offset)
        return None

    def sections(self, prefix: str = "") -> list[Section]:
        """Everything that was published by owners whose name starts with `prefix`, also by those that are gone."""
        found = []
        for index in range(SECTION_COUNT):
            owner = self._owner(self._offset(index))
            if owner and owner.startswith(prefix):
                found.append(self._section(self._offset(index)))
        return [section for section in found if section is not None]

    def _place(self, name: bytes) -> int:
        offsets = [self._offset(index) for index in range(SECTION_COUNT)]
        owners = [self._owner(offset) for offset in offsets]
        wanted = name.decode("ascii")
        if wanted in owners:
            return offsets[owners.index(wanted)]
        if "" in owners:
            return offsets[owners.index("")]
        for offset, owner in zip(offsets, owners, strict=True):
            if not is_held(self.run_folder / f"{owner}.lock"):
                return offset
        raise LiveStateError(f"{self.path} has no free section; {SECTION_COUNT} processes are alive")

    def _section(self, offset: int) -> Section | None:
        deadline = time.monotonic() + READ_PATIENCE
        last = False
        while True:
            name, pid, length, checksum, _, updated_at = _SECTION_HEADER.unpack_from(self._map, offset)
            if length == 0:
                return None
            owner = name.rstrip(b"\0").decode("ascii", "replace")
            lock = self.run_folder / f"{owner}.lock"
            if length <= MAX_PAYLOAD:
                start = offset + _SECTION_HEADER.size
                payload = self._map[start : start + length]
                if zlib.crc32(payload) == checksum:
                    # Between its lock and its first report, a new process stands beside the old one's section.
                    alive = holder_pid(lock) == pid
                    return Section(owner, pid, updated_at, alive, json.loads(payload))
            if last:
                return None
            # Killed in the middle of a report, it left the section torn for good; or a whole one was its last.
            last = not is_held(lock) or time.monotonic() >= deadline
            if not last:
                time.sleep(0.0005)

    def _owner(self, offset: int) -> str:
        return bytes(self._map[offset : offset + 64]).rstrip(b"\0").decode("ascii", "replace")

    @staticmethod
    def _offset(index: int) -> int:
        return HEADER_SIZE + index * SECTION_SIZE


class SectionWriter:
    """One section, written by one process."""

    def __init__(self, mapping: mmap.mmap, offset: int, name: bytes) -> None:
        self._map = mapping
        self._offset = offset
        self._name = name
        self._sequence = 0

    def publish(self, data: dict[str, Any]) -> None:
        """Replace the section's content with `data`, at most 64 KiB of JSON.

        Raises:
            LiveStateError: it is larger than a section.
        """
        payload = json.dumps(data, separators=(",", ":")).encode()
        if len(payload) > MAX_PAYLOAD:
            raise LiveStateError(f"{len(payload)} bytes do not fit a section of {MAX_PAYLOAD}")
        self._sequence += 1
        start = self._offset + _SECTION_HEADER.size
        self._map[start : start + len(payload)] = payload
        header = _SECTION_HEADER.pack(
            self._name, os.getpid(), len(payload), zlib.crc32(payload), self._sequence, time.time()
        )
        # Not pack_into, which clears the header first: a reader would see a section without an owner.
        self._map[self._offset : self._offset + len(header)] = header
