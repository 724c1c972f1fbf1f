"""Finds tritonserver and makes what it needs to run with this Python.

A server of NVIDIA's containers (on PATH or under /opt/tritonserver) is used as it is. The one in the nvidia-pytriton
wheel needs a folder of backends that holds the stub of the running Python, and its bundled libraries.
"""

import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

CONTAINER_FOLDER = Path("/opt/tritonserver")
STUB_NAME = "triton_python_backend_stub"


class Origin(StrEnum):
    """Where a server comes from."""

    INSTALLED = "installed"
    WHEEL = "wheel"


@dataclass(frozen=True, slots=True)
class TritonInstall:
    """A tritonserver that was found.

    Attributes:
        binary: the executable.
        backends: folder that holds python/ with the Python backend; of an installed server it is its own.
        stubs: of the wheel, the folder with a stub for each version of Python; else None.
        libraries: of the wheel, its bundled shared libraries; else None.
    """

    origin: Origin
    binary: Path
    backends: Path
    stubs: Path | None = None
    libraries: Path | None = None


def find_triton() -> TritonInstall | None:
    """The server to run: of PATH, else of /opt/tritonserver, else of the wheel; None where there is none."""
    on_path = shutil.which("tritonserver")
    for binary in (Path(on_path) if on_path else None, CONTAINER_FOLDER / "bin" / "tritonserver"):
        if binary is not None and os.access(binary, os.X_OK):
            resolved = binary.resolve()
            if (wheel := _wheel()) is not None and resolved == wheel.binary.resolve():
                return wheel
            backends = resolved.parent.parent / "backends"
            return TritonInstall(Origin.INSTALLED, resolved, backends)
    return _wheel()


def _wheel() -> TritonInstall | None:
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    server = package / "tritonserver"
    binary = server / "bin" / "tritonserver"
    if not binary.is_file():
        return None
    return TritonInstall(
        Origin.WHEEL,
        binary,
        server / "backends",
        server / "python_backend_stubs",
        package.parent / "nvidia_pytriton.libs",
    )


def python_version() -> str:
    """Major and minor number of the running Python, such as 3.12."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def wheel_stub(install: TritonInstall) -> Path:
    """The wheel's stub for the running Python."""
    if install.stubs is None:
        raise ValueError("an installed server has a single stub")
    return install.stubs / python_version() / STUB_NAME


def stub_python(stub: Path) -> str | None:
    """The version of Python that a stub was linked with, such as 3.12; None where it does not tell."""
    found = re.search(rb"libpython(3\.[0-9]+)\.so", stub.read_bytes())
    return found.group(1).decode() if found else None


def prepare_backends(install: TritonInstall, folder: Path) -> Path:
    """The folder for --backend-directory; the wheel's backends are copied into `folder` with the right stub."""
    if install.origin is Origin.INSTALLED:
        return install.backends
    target = folder / "backends" / "python"
    target.mkdir(parents=True, exist_ok=True)
    for source in (
        install.backends / "python" / "libtriton_python.so",
        install.backends / "python" / "triton_python_backend_utils.py",
        wheel_stub(install),
    ):
        _copy_if_other(source, target / source.name)
    (target / STUB_NAME).chmod(0o755)
    return target.parent


def shared_libpython() -> Path | None:
    """The running Python's shared library, which the wheel's stub loads; None where there is none."""
    name = sysconfig.get_config_var("INSTSONAME")
    if not name or ".so" not in name:
        return None
    folders = [sysconfig.get_config_var("LIBDIR"), Path(sys.base_prefix) / "lib"]
    multiarch = sysconfig.get_config_var("MULTIARCH")
    if multiarch:
        folders += [f"/usr/lib/{multiarch}", f"/lib/{multiarch}"]
    for folder in folders:
        if folder and (Path(folder) / name).exists():
            return Path(folder) / name
    return None


def server_environment(install: TritonInstall) -> dict[str, str]:
    """The environment for the server: this Python first on PATH, since the stub takes its packages from there."""
    environment = dict(os.environ)
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    if install.libraries is not None:
        library = shared_libpython()
        folders = [str(install.libraries)] + ([str(library.parent)] if library else [])
        inherited = environment.get("LD_LIBRARY_PATH")
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(folders + ([inherited] if inherited else []))
    return environment


def _copy_if_other(source: Path, target: Path) -> None:
    if target.exists():
        old, new = target.stat(), source.stat()
        if old.st_size == new.st_size and old.st_mtime_ns == new.st_mtime_ns:
            return
    # A stub that runs cannot be overwritten, only replaced.
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copy2(source, temporary)
    os.replace(temporary, target)
