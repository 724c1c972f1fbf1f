"""Sockets that a process of a model got from the server at its start, and that are none of its business."""

import os
import stat
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")


def close_inherited_sockets() -> int:
    """Close every socket of this process but its standard streams; call it before anything opens one.

    tritonserver 24.10 forks a model's process with its HTTP connections open and without close-on-exec. A process that
    starts while clients are connected would hold those connections for its whole life: a client would never see the
    server close one, and the kernel would keep what the client closed.

    Returns:
        how many there were.
    """
    closed = 0
    for name in os.listdir(_DESCRIPTORS):
        descriptor = int(name)
        if descriptor <= 2:
            continue
        try:
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                closed += 1
        except OSError:
            # The descriptor of the listing itself is gone by now.
            continue
    return closed
