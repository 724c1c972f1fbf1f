"""The build of the library: named by what it is made of, and used again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from deepseek_ops import build as building
from deepseek_ops.build import BuildError, Recipe, build, library_path


def test_names_follow_sources_and_flags() -> None:
    recipe = Recipe.current()
    assert recipe.sha256 == Recipe.current().sha256
    assert recipe.sha256 != Recipe.current(("-g",)).sha256
    changed = Recipe({**recipe.sources, "call.cc": recipe.sources["call.cc"] + "\n"})
    assert changed.sha256 != recipe.sha256
    assert recipe.sha256 in library_path(Path("folder")).name


def test_a_library_that_is_there_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library_path(tmp_path).write_bytes(b"built before")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build(tmp_path).read_bytes() == b"built before"


def test_tells_what_to_do_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"no C\+\+ compiler was found.*apt install g\+\+"):
        build(tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="CXX names 'no-such-compiler'"):
        build(tmp_path)


def test_tells_what_to_do_about_a_folder_that_takes_no_library(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "cache", Path("/proc/nowhere")):
        with pytest.raises(BuildError, match=f"cannot be built in {folder} .*set XDG_CACHE_HOME to a folder that you"):
            build(folder)


def test_leaves_nothing_when_the_compiler_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "failing"
    compiler.write_text("#!/bin/sh\necho 'call.cc:1: error: no' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(BuildError, match=r"call\.cc:1: error: no"):
        build(tmp_path / "made")
    assert [path.name for path in (tmp_path / "made").iterdir()] == [".lock"]


def test_removes_what_killed_builds_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = tmp_path / ".build-killed"
    left.mkdir()
    (left / "call.cc.o").write_bytes(b"half")
    other = tmp_path / "deepseek_ops-0.so"
    other.write_bytes(b"built before")
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(BuildError):
        build(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {".lock", other.name}


def test_the_command_prints_the_path(library: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "deepseek_ops"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(library)
    broken = {**os.environ, "CXX": "no-such-compiler", "XDG_CACHE_HOME": "/nonexistent"}
    done = subprocess.run([sys.executable, "-m", "deepseek_ops"], capture_output=True, text=True, env=broken)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "no-such-compiler" in done.stderr


def test_sources_name_no_machine() -> None:
    assert building.SOURCES.name == "csrc"
    assert all(str(Path.home()) not in text for text in Recipe.current().sources.values())
