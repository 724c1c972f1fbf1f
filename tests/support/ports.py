"""Ports for the servers of tests.

A port that the kernel hands out is free only until it is closed again: before a server has come to open it, an
outgoing connection or another test may have been given the same. So these lie below the range that the kernel gives
away by itself, and each test process takes them from a block of its own, which a lock keeps from the others.
"""

import fcntl
import os
import random
import socket
import tempfile
from functools import cache
from pathlib import Path
from typing import IO

FIRST, LAST, BLOCK = 20_000, 32_000, 200


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that are free now and that no other test process asks for.

    They come in turn, so that one whose server has just ended is not used again at once.
    """
    found: list[int] = []
    block = _own_block()
    for _ in range(BLOCK):
        if len(found) == count:
            return found
        port = block.next_port()
        if _is_free(port):
            found.append(port)
    raise RuntimeError(f"fewer than {count} of the ports {block.first} to {block.first + BLOCK - 1} are free")


class _Block:
    """Ports of this process, as long as it lives."""

    def __init__(self, first: int, lock: IO[str]) -> None:
        self.first = first
        self._lock = lock
        self._turn = random.SystemRandom().randrange(BLOCK)

    def next_port(self) -> int:
        self._turn = (self._turn + 1) % BLOCK
        return self.first + self._turn


@cache
def _own_block() -> _Block:
    folder = Path(tempfile.gettempdir()) / f"piccard-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    for first in range(FIRST, LAST, BLOCK):
        # Open as long as the process lives.
        lock = open(folder / f"{first}.lock", "w")  # noqa: SIM115
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
        else:
            return _Block(first, lock)
    raise RuntimeError(f"every block of ports from {FIRST} to {LAST} belongs to another test process")


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
