"""A lock that a process holds while it lives: the kernel frees it at whatever death, so that others notice at once."""

import fcntl
import os
import time
from pathlib import Path


class AlreadyHeldError(RuntimeError):
    """Another living process holds the lock."""


class ProcessLock:
    """An exclusive flock on a file, held until `release` or the end of the process.

    The descriptor is not inherited across exec; a plain fork would share it, so a holder does not fork.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def acquire(self, timeout: float = 2.0) -> None:
        """Take the lock.

        Args:
            timeout: seconds to try. A look at liveness holds a shared lock for microseconds, so one try is not enough.

        Raises:
            AlreadyHeldError: another process still holds it.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
                    os.close(descriptor)
                    raise AlreadyHeldError(f"{self.path} is held by process {holder or 'unknown'}") from None
                time.sleep(0.01)
            else:
                break
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        """Give the lock back; nothing where it is not held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def is_held(path: Path) -> bool:
    """Whether a living process holds the lock at `path`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def holder_pid(path: Path) -> int | None:
    """The process id of who holds the lock at `path`, or None where nobody does."""
    if not is_held(path):
        return None
    try:
        return int(path.read_text().strip())
    except (OSError, ValueError):
        return None
