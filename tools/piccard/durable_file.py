"""Files that are replaced whole and survive a power cut."""

import os
import re
from pathlib import Path


def write_durably(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace `path` with `text`: a reader sees the old or the new content, and after the return it is on disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def put_in_place(made: Path, name: Path) -> None:
    """Rename a file, or a folder of files, once its content is on disk: a name that says what it holds stays true.

    Raises OSError: the disk is full, or `name` is a folder with something in it.
    """
    for path in sorted(made.iterdir()) if made.is_dir() else []:
        _sync(path)
    _sync(made)
    os.replace(made, name)
    sync_folder(name.parent)


def writer_of(path: Path) -> int | None:
    """The process that writes the temporary file or link `path`; None where it is another file."""
    found = re.fullmatch(r"\..+\.([0-9]+)\.tmp", path.name)
    return None if found is None else int(found.group(1))


def sync_folder(folder: Path) -> None:
    """Put renames within `folder` on disk."""
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
