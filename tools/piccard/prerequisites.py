"""What a machine has to bring, looked at before the server starts; each lack is one sentence with its remedy."""

import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Collection, Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from piccard_contract.home import Service
from piccard_contract.process_lock import holder_pid

from piccard.server_settings import ServerSettings
from piccard.shared_memory import SHARED_MEMORY
from piccard.triton_binary import (
    STUB_NAME,
    Origin,
    TritonInstall,
    python_version,
    shared_libpython,
    stub_python,
    wheel_stub,
)

PYTHONS = ("3.11", "3.12")
WHEEL_GLIBC = (2, 35)

# A stub process starts with 1 MiB and a message queue, and grows while large tensors travel.
SHARED_MEMORY_PER_PROCESS = 8 * 2**20


def problems(
    install: TritonInstall | None,
    settings: ServerSettings,
    home: Path,
    processes: int,
    bound: Collection[str] = (),
) -> list[str]:
    """Everything that keeps a server from running here, in the order in which to mend it.

    Args:
        processes: model processes that it will start.
        bound: options whose port this process has taken already.
    """
    found = [python_problem(), triton_problem(install)]
    if install is not None and install.origin is Origin.WHEEL:
        found += [glibc_problem(), libpython_problem(), numpy_problem()]
    if install is not None:
        found.append(stub_problem(install))
    # A gateway that a killed supervisor left makes room, and the next one waits for it.
    left = holder_pid(Service(home.absolute()).gateway_lock) is not None
    ports = port_problems(replace(settings, gateway_port=None) if left else settings, bound)
    found += [home_problem(home), shared_memory_problem(processes), *ports]
    return [problem for problem in found if problem]


def python_problem(running: str | None = None) -> str | None:
    """The version of Python."""
    running = running or python_version()
    if running in PYTHONS:
        return None
    return f"this is Python {running}; Piccard needs {' or '.join(PYTHONS)}: install one and run `make clean serve`"


def triton_problem(install: TritonInstall | None) -> str | None:
    """Whether there is a server at all."""
    if install is None:
        return (
            "no tritonserver was found on PATH, in /opt/tritonserver or in the wheel nvidia-pytriton; "
            "run `pip install nvidia-pytriton==0.7.0` or start this in NVIDIA's Triton container"
        )
    if not os.access(install.binary, os.X_OK):
        return f"{install.binary} cannot be executed; run `chmod +x {install.binary}`"
    return None


def glibc_problem(found: tuple[int, ...] | None = None) -> str | None:
    """The C library that the wheel's server needs."""
    if found is None:
        found = tuple(int(part) for part in re.findall(r"[0-9]+", platform.libc_ver()[1])[:2])
    if found >= WHEEL_GLIBC:
        return None
    return (
        f"the C library is glibc {'.'.join(map(str, found)) or '(unknown)'}, the wheel's tritonserver needs "
        f"{'.'.join(map(str, WHEEL_GLIBC))}; use Debian 12, Ubuntu 22.04 or newer, or NVIDIA's Triton container"
    )


def libpython_problem() -> str | None:
    """The shared library of Python that the server's stub loads."""
    if shared_libpython() is not None:
        return None
    return (
        f"this Python ({sys.executable}) has no shared libpython{python_version()}.so, which tritonserver needs; "
        f"install libpython{python_version()} (Debian, Ubuntu) or a Python built with --enable-shared"
    )


def numpy_problem(found: str | None = None) -> str | None:
    """numpy 2 makes the wheel's stub read garbage from every tensor."""
    try:
        found = found or version("numpy")
    except PackageNotFoundError:
        return "numpy is not installed; run `make serve`"
    if int(found.split(".")[0]) < 2:
        return None
    return f"numpy is {found}, the wheel's tritonserver needs numpy 1; run `pip install 'numpy<2'`"


def stub_problem(install: TritonInstall) -> str | None:
    """Whether the server's Python stub is of the running Python."""
    if install.origin is Origin.WHEEL:
        if wheel_stub(install).is_file():
            return None
        return f"the wheel's tritonserver has no stub for Python {python_version()}; use {' or '.join(PYTHONS)}"
    stub = install.backends / "python" / STUB_NAME
    if not stub.is_file():
        return f"{install.binary} comes without the Python backend ({stub} is missing); use an image that has it"
    linked = stub_python(stub)
    if linked in (None, python_version()):
        return None
    return (
        f"the stub of {install.binary} runs Python {linked} and this is {python_version()}; "
        f"install Piccard under Python {linked}"
    )


def home_problem(home: Path) -> str | None:
    """Whether the home can be written."""
    for folder in (home, home / "model_repository", home / "state"):
        if not folder.is_dir():
            return f"{folder} is missing; run `piccard init {home}`"
        if not os.access(folder, os.W_OK | os.X_OK) or _read_only_mount(folder):
            return f"{folder} is read-only for you; make it writable or choose another home with --home"
    return None


def shared_memory_problem(processes: int, free: int | None = None) -> str | None:
    """The room in /dev/shm, in bytes, through which models and server talk."""
    if free is None:
        if not SHARED_MEMORY.is_dir():
            return f"{SHARED_MEMORY} is missing, through which models and server talk; mount a tmpfs there"
        free = shutil.disk_usage(SHARED_MEMORY).free
    need = processes * SHARED_MEMORY_PER_PROCESS
    if free >= need:
        return None
    return (
        f"{SHARED_MEMORY} has {free // 2**20} MiB free, {processes} model processes need {need // 2**20} MiB; "
        "enlarge it (docker run --shm-size=1g) or remove what `piccard doctor` calls left over"
    )


def port_problems(settings: ServerSettings, bound: Collection[str] = ()) -> Iterator[str]:
    """Ports that are taken, or that two options share."""
    seen: dict[int, str] = {}
    for option, port in settings.ports.items():
        if port in seen:
            yield f"{seen[port]} and {option} are both {port}; give them different ports"
            continue
        seen[port] = option
        if option not in bound and (reason := _cannot_bind(settings.host, port)):
            yield f"port {port} of {settings.host} cannot be used ({reason}); choose another with {option}"
    if settings.gateway_port is None:
        return
    if settings.gateway_port in seen:
        other = seen[settings.gateway_port]
        yield f"{other} and --gateway-port are both {settings.gateway_port}; give them different ports"
    elif reason := _cannot_bind(settings.gateway_host, settings.gateway_port):
        yield (
            f"port {settings.gateway_port} of {settings.gateway_host} cannot be used ({reason}); choose another with "
            "--gateway-port, or leave the gateway out with --no-gateway"
        )


def _cannot_bind(host: str, port: int) -> str | None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    # A name that is none ends in errors of its encoding.
    except (OSError, OverflowError, ValueError) as error:
        return str(error)
    with socket.socket(family, kind, protocol) as probe:
        # As servers do: an address in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            return error.strerror.lower() if error.strerror else str(error)
    return None


def _read_only_mount(folder: Path) -> bool:
    return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
