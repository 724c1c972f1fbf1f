"""Whether NVIDIA MPS lets processes compute on one GPU at once.

A client finds the control daemon by the pipes in a folder, which an environment variable may name (NVIDIA
Multi-Process Service, "Environment Variables"); that daemon reads the pipe `control` as long as it lives.
"""

import errno
import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

FOLDER_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
DEFAULT_FOLDER = "/tmp/nvidia-mps"
_CONTROL = "control"


def has_gpu(devices: Path = Path("/dev")) -> bool:
    """Whether this machine, or container, has an NVIDIA GPU."""
    return any(path.name.removeprefix("nvidia").isdigit() for path in devices.glob("nvidia*"))


def pipe_folder(environment: Mapping[str, str]) -> Path:
    """Where a process with `environment` looks for the control daemon."""
    return Path(environment.get(FOLDER_VARIABLE) or DEFAULT_FOLDER)


def environment_of(pid: int) -> Mapping[str, str]:
    """What a process was started with; this process's own where that cannot be read."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "surrogateescape")
    except OSError:
        return os.environ
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def is_on(folder: Path) -> bool:
    """Whether a control daemon reads the pipe in `folder`. Nothing is written to it."""
    control = folder / _CONTROL
    try:
        mode = control.stat().st_mode
    except OSError:
        return False
    if stat.S_ISSOCK(mode):
        return _listens(control)
    return stat.S_ISFIFO(mode) and _is_read(control)


def mps_note(environment: Mapping[str, str]) -> str:
    """Whether MPS is on for processes with `environment`, and what follows from it."""
    folder = pipe_folder(environment)
    if is_on(folder):
        return (
            f"NVIDIA MPS is on ({folder}): versions on one GPU compute at the same time; a kernel that faults in one of"
            " them may end the others too"
        )
    return (
        f"NVIDIA MPS is off (no daemon is at {folder / _CONTROL}): versions on one GPU, such as stable and its canary,"
        " take turns on it, so that each waits while another computes; with `nvidia-cuda-mps-control -d` before"
        " `piccard serve` they compute at the same time"
    )


def _is_read(pipe: Path) -> bool:
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    # Nobody has it open for reading, or it is not for this user, whose versions cannot write to it either.
    except OSError:
        return False
    os.close(descriptor)
    return True


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        try:
            client.connect(str(path))
        except OSError as error:
            # A socket of another kind has somebody at its end too.
            return error.errno == errno.EPROTOTYPE
    return True
