"""What code is known by: one hash over the files of its packages, wherever they lie."""

import hashlib
import importlib.util
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

# What a version runs and a snapshot holds, and what admission and routers run.
ENGINE_PACKAGES = ("deepseek_engine", "piccard_contract")
ENSEMBLE_PACKAGES = ("piccard_canary", "piccard_contract")

# What was compiled, and the caches of linters.
NO_CODE = ("__pycache__", "*.pyc", ".*")


def packages_hash(packages: Mapping[str, Path]) -> str:
    """SHA-256 over the names and contents of all files of `packages` (name -> folder) but `NO_CODE`."""
    files = [
        (Path(name, path.relative_to(folder)), path)
        for name, folder in packages.items()
        for path in folder.rglob("*")
        if not any(fnmatch(part, pattern) for part in path.relative_to(folder).parts for pattern in NO_CODE)
        and path.is_file()
    ]
    digest = hashlib.sha256()
    for name, path in sorted(files):
        content = path.read_bytes()
        digest.update(f"{name.as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def package_folder(name: str) -> Path:
    """Where a package lies: of one that is imported already, the folder that it was imported from.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{name} is not installed")
    return Path(spec.origin).parent


def installed_hash(names: tuple[str, ...]) -> str:
    """The hash of packages as they are installed, or were imported."""
    return packages_hash({name: package_folder(name) for name in names})


def own_code_hash(names: tuple[str, ...]) -> str:
    """The hash of the code that this process runs; empty where its files cannot be read any more."""
    try:
        return installed_hash(names)
    except OSError:
        return ""
