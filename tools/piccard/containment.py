"""Whether what a folder holds stays within it: a link may show anything of the machine under a harmless name."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from piccard_contract.home import Service

from piccard.errors import OperationError


def check_version_folder(service: Service, version: int) -> None:
    """Look through a version's folder before it is loaded: all of it is code.

    Raises:
        OperationError: something in it leads out of it.
    """
    folder = service.version_folder(version)
    if folder.is_symlink():
        raise OperationError(f"{folder} is a link; a version's folder is a folder of its own: publish it again")
    for path in strays(folder):
        raise OperationError(f"{path} leads out of the version's folder, which holds all its code; publish it again")


def check_checkpoint_files(folder: Path) -> None:
    """Look through a checkpoint's folder before it is published: its files are code, and clients see what they hold.

    Links may lead to files of the folder and, as in Hugging Face's cache, to the blobs beside `snapshots/`.

    Raises:
        OperationError: a link leads elsewhere, or a file is none.
    """
    allowed = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":
        allowed.append(folder.resolve().parent.parent / "blobs")
    for path in strays(folder, allowed):
        raise OperationError(f"{path} leads to {path.resolve()}, out of the checkpoint; put the file itself there")
    for path in _files(folder):
        if not stat.S_ISREG(path.stat().st_mode):
            raise OperationError(f"{path} is no regular file; remove it from the checkpoint")


def strays(folder: Path, allowed: list[Path] | None = None) -> Iterator[Path]:
    """Links below `folder` that lead out of it, or out of `allowed`; those that lead nowhere too."""
    roots = allowed or [folder.resolve()]
    for path in _entries(folder):
        if path.is_symlink() and not any(_leads_into(path, root) for root in roots):
            yield path


def _leads_into(path: Path, root: Path) -> bool:
    try:
        return path.resolve(strict=True).is_relative_to(root)
    except (OSError, RuntimeError):
        # It points at nothing, or goes in a circle.
        return False


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in _entries(folder) if not path.is_dir())


def _entries(folder: Path) -> Iterator[Path]:
    # Links to folders are told and not entered.
    for where, folders, files in os.walk(folder):
        yield from (Path(where, name) for name in sorted((*folders, *files)))
