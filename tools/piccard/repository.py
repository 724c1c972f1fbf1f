"""A service's model folders, as tritonserver loads them."""

import os
import py_compile
import re
from pathlib import Path

from piccard_contract.home import VERSION_NAME, Service
from piccard_contract.version_file import VersionFile

from piccard.durable_file import write_durably
from piccard.model_config import ROLLING_VERSIONS, config_text, llm_config, model_configs

VERSION_MODEL_PY = '''\
"""A version of the model: runs the engine of its own folder code/ where there is one, else the installed engine."""

import sys
from pathlib import Path

_code = Path(__file__).parent / "code"
if _code.is_dir():
    sys.path.insert(0, str(_code))

from deepseek_engine.server_model import VersionModel as TritonPythonModel  # noqa: E402

__all__ = ["TritonPythonModel"]
'''

ADMISSION_MODEL_PY = '''\
"""Admission: reads, validates and completes a request once."""

from piccard_canary.server_model import AdmissionModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
'''

ROUTER_MODEL_PY = '''\
"""The router: chooses a request's version and sends its answer on."""

from piccard_canary.server_model import RouterModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


def write_service(service: Service, stable: int) -> None:
    """Write the six model folders of `service`, without its versions.

    Args:
        stable: the version that the model's config.pbtxt names.
    """
    for model, config in model_configs(service, stable).items():
        folder = service.repository / model
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(folder / "config.pbtxt", config_text(config))
    for ensemble in (service.ensemble, service.unary):
        # Triton asks for a version folder of an ensemble too; git keeps no empty ones, hence the file.
        (service.repository / ensemble / "1").mkdir(exist_ok=True)
        (service.repository / ensemble / "1" / ".gitkeep").touch()
    for model, text in (
        (service.admission, ADMISSION_MODEL_PY),
        (service.router, ROUTER_MODEL_PY),
        (service.router_unary, ROUTER_MODEL_PY),
    ):
        for number in ROLLING_VERSIONS:
            _write_model_py(service.repository / model / str(number), text)


def write_version(folder: Path, version: VersionFile) -> None:
    """Write model.py and version.yaml of a version into `folder`."""
    _write_model_py(folder, VERSION_MODEL_PY)
    (folder / "version.yaml").write_text(version.dump(), encoding="utf-8")


def compile_models(service: Service) -> None:
    """Compile every model.py beforehand, so that a server never writes into a live version's folder."""
    for model in service.models:
        for path in sorted((service.repository / model).glob("[0-9]*/model.py")):
            compile_file(path)


def compile_file(path: Path) -> Path:
    """Compile one file for the running Python; the result is never checked against its source again."""
    compiled = py_compile.compile(
        str(path), doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
    )
    assert compiled is not None
    return Path(compiled)


def write_stable_config(service: Service, stable: int) -> None:
    """Make the model's config.pbtxt name `stable` alone; a running server does not look at it until it restarts."""
    write_durably(service.llm_folder / "config.pbtxt", config_text(llm_config(service, [stable])))


def configured_versions(service: Service) -> list[int] | None:
    """The versions that the model's config.pbtxt names; None where it cannot be read as one of ours."""
    try:
        text = (service.llm_folder / "config.pbtxt").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^\s*versions:\s*\[([0-9, ]*)\]", text, re.MULTILINE)
    return None if found is None else [int(number) for number in found.group(1).split(",") if number.strip()]


def stable_target(service: Service) -> int | None:
    """The version that the stable link names, or None where it names none."""
    try:
        target = os.readlink(service.stable_link)
    except OSError:
        return None
    return int(target) if re.fullmatch(VERSION_NAME, target) else None


def point_stable(service: Service, version: int) -> None:
    """Point the stable link at `version` by one rename; every request after it sees the new target."""
    if not service.version_folder(version).is_dir():
        raise FileNotFoundError(f"{service.version_folder(version)} is missing; stable must not dangle")
    # Beside the repository: a link of another name in a model's folder could be met by a load.
    temporary = service.home / f".stable.{service.name}.{os.getpid()}.tmp"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(str(version))
    os.replace(temporary, service.stable_link)


def version_numbers(service: Service) -> list[int]:
    """Numbers of the version folders on disk."""
    if not service.llm_folder.is_dir():
        return []
    names = [entry.name for entry in service.llm_folder.iterdir() if entry.is_dir() and not entry.is_symlink()]
    return sorted(int(name) for name in names if re.fullmatch(VERSION_NAME, name))


def _write_model_py(folder: Path, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.py"
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
