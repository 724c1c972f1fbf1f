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


def writer_of(path: Path) -> int | None:
    """The process that writes the temporary file or link `path`; None where it is another file."""
    found = re.fullmatch(r"\..+\.([0-9]+)\.tmp", path.name)
    return None if found is None else int(found.group(1))


def sync_folder(folder: Path) -> None:
    """Put renames within `folder` on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
