"""A process lets go of the sockets that it was started with, and of nothing else."""

import socket
import subprocess
import sys
from pathlib import Path

CLOSE = """
import os, sys
from piccard_contract.inherited_sockets import close_inherited_sockets
kept = int(sys.argv[1])
print(close_inherited_sockets(), close_inherited_sockets())
os.fstat(kept)
print("waits", flush=True)
sys.stdin.read()
"""


def test_a_connection_ends_though_a_child_inherited_it(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with open(tmp_path / "kept", "w") as kept:
        descriptors = (ours.fileno(), theirs.fileno(), kept.fileno())
        child = subprocess.Popen(
            [sys.executable, "-c", CLOSE, str(kept.fileno())],
            pass_fds=descriptors,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert child.stdout is not None
            assert child.stdout.readline().split() == ["2", "0"]
            assert child.stdout.readline() == "waits\n"
            theirs.close()
            ours.settimeout(30)
            assert ours.recv(1) == b"", "the child still holds the other end"
        finally:
            ours.close()
            child.communicate("")
