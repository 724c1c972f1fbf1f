"""What a version is published with: a copy of the engine's code, compiled, and hashes of everything."""

import hashlib
import json
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from piccard_contract.code_hash import ENGINE_PACKAGES, NO_CODE, installed_hash, package_folder, packages_hash
from piccard_contract.version_file import Hashes

from piccard.repository import compile_file

CODE_FOLDER = "code"


def copy_code(folder: Path) -> None:
    """Copy the engine and the contract to `folder`/code and compile them, so that nothing is written there later."""
    for name in ENGINE_PACKAGES:
        target = folder / CODE_FOLDER / name
        shutil.copytree(package_folder(name), target, ignore=shutil.ignore_patterns(*NO_CODE))
        for path in sorted(target.rglob("*.py")):
            compile_file(path)


def code_hash(folder: Path) -> str:
    """The hash of the code in a version's folder."""
    return packages_hash({"": folder})


@cache
def installed_code_hash() -> str:
    """The hash that a snapshot of the installed engine would have."""
    return installed_hash(ENGINE_PACKAGES)


def checkpoint_hashes(checkpoint: Path, *, weights: bool = True) -> Hashes:
    """Hashes of a Hugging Face checkpoint's parts.

    Args:
        weights: whether to read all the weights; at some GB/s this takes minutes for the largest checkpoints.
    """
    shards = sorted(checkpoint.glob("*.safetensors"))
    return Hashes(
        weights=_files_hash(shards) if weights and shards else None,
        tokenizer=_file_hash(checkpoint / "tokenizer.json") if (checkpoint / "tokenizer.json").is_file() else None,
        template=_template_hash(checkpoint),
    )


def export_hash(folder: Path) -> str:
    """SHA-256 over the names and hashes of an export's files."""
    return _files_hash(sorted(folder.iterdir()))


def library_hash(path: Path) -> str:
    """SHA-256 of a custom-op library."""
    return _file_hash(path)


def _template_hash(checkpoint: Path) -> str | None:
    beside = checkpoint / "chat_template.jinja"
    if beside.is_file():
        return hashlib.sha256(beside.read_bytes()).hexdigest()
    settings = checkpoint / "tokenizer_config.json"
    if not settings.is_file():
        return None
    template = json.loads(settings.read_text(encoding="utf-8")).get("chat_template")
    return None if template is None else hashlib.sha256(json.dumps(template).encode()).hexdigest()


def _files_hash(paths: Iterable[Path]) -> str:
    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(lambda path: f"{path.name}\0{_file_hash(path)}\n", paths))
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def _file_hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
