"""The corpus: the Python standard library of the running interpreter, split by module.

    python -m training.corpus OUT.jsonl

One JSON object a line: ``path`` (relative to the library's folder), ``split`` (train, valid or test) and ``text``.
"""

import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Split = Literal["train", "valid", "test"]

# Tests, generated tables and data teach a language model nothing about writing Python.
EXCLUDED_FOLDERS = frozenset(
    {"__pycache__", "encodings", "idle_test", "lib-dynload", "pydoc_data", "site-packages", "test", "tests"}
)
EXCLUDED_FILES = frozenset({"html/entities.py", "msilib/schema.py", "msilib/sequence.py", "stringprep.py", "this.py"})
EXCLUDED_PREFIXES = ("_sysconfigdata", "config-")

TEST_MODULES = frozenset(
    {
        "asyncio/queues.py",
        "configparser.py",
        "csv.py",
        "fractions.py",
        "graphlib.py",
        "heapq.py",
        "http/cookies.py",
        "queue.py",
        "sched.py",
        "shlex.py",
        "textwrap.py",
        "tomllib/",
        "zoneinfo/",
    }
)
VALID_MODULES = frozenset({"calendar.py", "cmd.py", "plistlib.py", "tempfile.py", "wsgiref/"})


@dataclass(frozen=True, slots=True)
class Document:
    """One source file."""

    path: str
    split: Split
    text: str


def split_of(path: str) -> Split:
    """Return the split of a module by its path relative to the library."""
    folder = path.split("/")[0] + "/"
    if path in TEST_MODULES or folder in TEST_MODULES:
        return "test"
    if path in VALID_MODULES or folder in VALID_MODULES:
        return "valid"
    return "train"


def is_source(path: str) -> bool:
    """Whether a relative path is hand-written library source."""
    parts = path.split("/")
    if EXCLUDED_FOLDERS.intersection(parts[:-1]) or path in EXCLUDED_FILES:
        return False
    return not parts[0].startswith(EXCLUDED_PREFIXES)


def library_documents(library: Path) -> Iterator[Document]:
    """Yield the library's sources in path order; a file that is not UTF-8 is left out."""
    for file in sorted(library.rglob("*.py")):
        path = file.relative_to(library).as_posix()
        if not is_source(path):
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            yield Document(path, split_of(path), text)


def read(path: Path) -> list[Document]:
    """Read a corpus file written by this module."""
    with path.open(encoding="utf-8") as lines:
        return [Document(**json.loads(line)) for line in lines]


def main() -> None:
    out = Path(sys.argv[1])
    documents = list(library_documents(Path(sysconfig.get_path("stdlib"))))
    out.write_text("".join(json.dumps(asdict(document)) + "\n" for document in documents), encoding="utf-8")
    for split in ("train", "valid", "test"):
        texts = [document.text for document in documents if document.split == split]
        print(f"{split:6}{len(texts):5} files {sum(len(text.encode()) for text in texts):9} bytes")
    print(f"Python {sys.version.split()[0]}, sha256 {hashlib.sha256(out.read_bytes()).hexdigest()}")


if __name__ == "__main__":
    main()
