"""Builds the operators' library with the machine's C++ compiler, and names it by what it is made of."""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from deepseek_ops.header import FILE_NAME, operators_header

SOURCES = Path(__file__).resolve().parents[1] / "csrc"
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-Wall",
    "-Wextra",
)
# A session may outlive the options that loaded the library, and threads keep memory of its own.
LINK_FLAGS = ("-shared", "-Wl,-z,nodelete", "-Wl,--no-undefined", "-pthread")
ISA_FLAGS: Mapping[str, Sequence[str]] = {
    "isa_avx2.cc": ("-mavx2", "-mfma", "-mf16c"),
    "isa_avx512.cc": ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"),
}
COMPILERS = ("g++", "c++", "clang++")
_SCRATCH = ".build-"


class BuildError(RuntimeError):
    """The library cannot be built here; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a library is made of.

    Attributes:
        sources: file name to text, headers too.
        extra_flags: for compiler and linker, beside those of this module.
        name: of the library, before the SHA-256.
        prepare: makes further sources in the folder in which all are compiled, and returns their names. What decides
            them is in `sources` too.
    """

    sources: Mapping[str, str]
    extra_flags: tuple[str, ...] = ()
    name: str = "deepseek_ops"
    prepare: Callable[[Path], list[str]] | None = None

    @classmethod
    def current(cls, extra_flags: Sequence[str] = ()) -> "Recipe":
        """Of the sources as they are now."""
        return cls({**sources_in("shared", "cpu"), FILE_NAME: operators_header()}, tuple(extra_flags))

    @property
    def sha256(self) -> str:
        """Over sources, flags and the machine's architecture."""
        digest = hashlib.sha256()
        for flag in (*FLAGS, *LINK_FLAGS, *self.extra_flags, platform.machine()):
            digest.update(f"{flag}\0".encode())
        for name, text in sorted(self.sources.items()):
            digest.update(f"{name}\0{' '.join(ISA_FLAGS.get(name, ()))}\0{len(text)}\0{text}".encode())
        return digest.hexdigest()

    @property
    def units(self) -> list[str]:
        """The files to compile."""
        return [name for name in self.sources if name.endswith(".cc") and self._is_for_this_machine(name)]

    def _is_for_this_machine(self, name: str) -> bool:
        return name not in ISA_FLAGS or platform.machine() == "x86_64"


def sources_in(*folders: str) -> dict[str, str]:
    """The texts in folders of csrc by their names, of which each is there once: they are compiled in one folder."""
    files = sorted(path for folder in folders for path in (SOURCES / folder).iterdir())
    return {path.name: path.read_text(encoding="utf-8") for path in files if path.suffix in (".cc", ".h", ".inl")}


def default_folder() -> Path:
    """Where libraries are kept: outside of model folders, and of checkouts that may be cleaned."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "piccard" / "custom_ops"


def library_path(folder: Path | None = None, recipe: Recipe | None = None) -> Path:
    """Where the library of the current sources is, once it is built."""
    recipe = recipe or Recipe.current()
    return (folder or default_folder()) / f"{recipe.name}-{recipe.sha256}.so"


def build(folder: Path | None = None, *, extra_flags: Sequence[str] = ()) -> Path:
    """The library of the current sources, built unless it is there already.

    Raises:
        BuildError: no compiler, it failed, or the folder cannot be written to.
    """
    return build_recipe(Recipe.current(extra_flags), folder)


def build_recipe(recipe: Recipe, folder: Path | None = None) -> Path:
    """The library of a recipe, built unless it is there already. Raises BuildError."""
    path = library_path(folder, recipe)
    if path.is_file():
        return path
    compiler = find_compiler()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (path.parent / ".lock").open("w") as lock:
            # Who comes second waits for the first one's library.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.is_file():
                _remove_unfinished(path.parent)
                _build(compiler, recipe, path)
    except OSError as error:
        raise BuildError(
            f"the ONNX Runtime operators cannot be built in {path.parent} ({error}): free space there, or set"
            " XDG_CACHE_HOME to a folder that you can write to"
        ) from error
    return path


def _remove_unfinished(folder: Path) -> None:
    """What killed builds left; the lock's holder has none yet, and nobody else builds."""
    for left in folder.glob(f"{_SCRATCH}*"):
        # A compiler that outlived its build may still write there; the next build removes that.
        shutil.rmtree(left, ignore_errors=True)


def _build(compiler: str, recipe: Recipe, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=_SCRATCH) as scratch:
        work = Path(scratch)
        for name, text in recipe.sources.items():
            (work / name).write_text(text, encoding="utf-8")
        made = recipe.prepare(work) if recipe.prepare else []
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            objects = list(pool.map(lambda name: _compile(compiler, recipe, work, name), [*recipe.units, *made]))
        _run([compiler, *LINK_FLAGS, *recipe.extra_flags, *objects, "-o", "library.so"], work)
        # Whoever finds the name finds a whole library.
        (work / "library.so").rename(path)


def find_compiler() -> str:
    """The C++ compiler: $CXX, or the first of the usual names. Raises BuildError."""
    asked = os.environ.get("CXX")
    for name in [asked] if asked else COMPILERS:
        found = shutil.which(name)
        if found:
            return found
    missing = f"CXX names {asked!r}, which is not there" if asked else "no C++ compiler was found"
    raise BuildError(
        f"{missing}: the ONNX Runtime operators are built on this machine, so install one (apt install g++) or set CXX;"
        " the torch runner needs none"
    )


def _compile(compiler: str, recipe: Recipe, work: Path, name: str) -> str:
    made = f"{name}.o"
    flags = (*FLAGS, *ISA_FLAGS.get(name, ()), *recipe.extra_flags)
    _run([compiler, *flags, "-c", name, "-o", made], work)
    return made


def _run(command: Sequence[str], work: Path) -> None:
    done = subprocess.run(command, cwd=work, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
