"""Every durable write of a command as a point at which it can fail, or at which the process can be killed.

The calls that put something on disk are wrapped where they are looked up, in `os`, so that no write can be forgotten.
After a kill no call of the dead process does anything: what undoes steps or tidies up finds every call dead too.
"""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from piccard.triton_control import LoadError

WRITES = ("replace", "rename", "symlink", "mkdir", "unlink", "rmdir", "fsync")


class Killed(BaseException):
    """What a command that was killed sees of every further write."""


class WritePoints:
    """Counts the points that a command passes, and fails or kills at one of them.

    Args:
        opens: whether to open a file that may have to be made (a lock, a temporary file, the audit log) is a point too.
            It can fail there; a kill leaves what a kill at the next point does.

    Attributes:
        look: called at each point while the process lives, to check what must hold at any time.
        passed: names of the points passed since `armed` began.
        control_failed: whether a call of the server's model control was made to fail since then.
    """

    def __init__(self, *, opens: bool = False) -> None:
        self._opens = opens
        self.look: Callable[[], None] = lambda: None
        self.passed: list[str] = []
        self.control_failed = False
        self._on = False
        self._dead = False
        self._kill_at = self._fail_at = -1
        self._errno = errno.ENOSPC
        self._for_good = False
        self._originals: dict[str, Callable[..., Any]] = {}

    @contextmanager
    def installed(self) -> Iterator["WritePoints"]:
        """The wrapped calls, for as long as the block runs."""
        self.install()
        try:
            yield self
        finally:
            self.remove()

    def install(self) -> None:
        for name in (*WRITES, "open"):
            self._originals[name] = getattr(os, name)
            setattr(os, name, self._wrapped(name))

    def remove(self) -> None:
        for name, call in self._originals.items():
            setattr(os, name, call)
        self._originals.clear()

    @contextmanager
    def armed(
        self, *, kill_at: int = -1, fail_at: int = -1, number: int = errno.ENOSPC, for_good: bool = False
    ) -> Iterator[None]:
        """The block is the command: killed at point `kill_at`, or point `fail_at` fails, counted from 0.

        Args:
            number: the error of a failing write.
            for_good: every point from `fail_at` on fails, as on a disk that stays full.
        """
        self.passed, self.control_failed, self._dead, self._on = [], False, False, True
        self._kill_at, self._fail_at, self._errno, self._for_good = kill_at, fail_at, number, for_good
        try:
            yield
        finally:
            self._on = False

    def control(self, name: str) -> None:
        """A point before or after a call of the server's model control."""
        self._pass(name, LoadError(f"{name}: the server answers no more"))

    def _wrapped(self, name: str) -> Callable[..., Any]:
        original = self._originals[name]

        def call(*arguments: Any, **options: Any) -> Any:
            if not self._on or (name == "mkdir" and os.path.isdir(arguments[0])):
                return original(*arguments, **options)
            if name == "open" and not (arguments[1] & os.O_CREAT and (self._opens or self._dead)):
                return original(*arguments, **options)
            where = "" if name == "fsync" else str(arguments[0])
            self._pass(f"{name} {where}", OSError(self._errno, os.strerror(self._errno), where or None))
            # Nothing here survives a power cut, and syncing would take most of the time.
            return None if name == "fsync" else original(*arguments, **options)

        return call

    def _pass(self, name: str, failure: Exception) -> None:
        if not self._on:
            return
        if self._dead:
            raise Killed
        if self._kill_at >= 0 and name.startswith(("fsync", "open ")):
            # A kill there leaves what a kill at the next point does.
            return
        self._look()
        number = len(self.passed)
        self.passed.append(name)
        if number == self._kill_at:
            self._dead = True
            raise Killed
        if number == self._fail_at or (self._for_good and number > self._fail_at >= 0):
            self.control_failed |= isinstance(failure, LoadError)
            raise failure

    def _look(self) -> None:
        self._on = False
        try:
            self.look()
        finally:
            self._on = True
