"""tools/environment.sh says in one sentence what a machine lacks, before it installs anything."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "environment.sh"
# What the script calls that no test stands in for.
REAL = ("dirname", "mktemp", "rm")
UNUSABLE = "exit 1"

Machine = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Runs the script in a folder of its own, on a PATH that holds only doubles: `machine(getconf="echo glibc 2.34")`.

    Names are commands and texts their shell code; without any it is a machine that lacks nothing but a Python. What
    the doubles write to $LOG is in tmp_path/log; `python` is the user's PYTHON.
    """

    def run(python: str = "", **commands: str) -> "subprocess.CompletedProcess[str]":
        checkout, path = tmp_path / "checkout", tmp_path / "bin"
        (checkout / "tools").mkdir(parents=True)
        shutil.copy(SCRIPT, checkout / "tools")
        path.mkdir()
        commands = {"getconf": "echo glibc 2.35", "uname": "echo x86_64", "python3": UNUSABLE, **commands}
        for name, code in commands.items():
            (path / name).write_text(f"#!/bin/sh\n{code}\n")
            (path / name).chmod(0o755)
        for name in REAL:
            if name not in commands:
                (path / name).symlink_to(shutil.which(name) or name)
        return subprocess.run(
            ["/bin/sh", checkout / "tools" / SCRIPT.name, "runtime"],
            env={"PATH": str(path), "PYTHON": python, "LOG": str(tmp_path / "log")},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


def assert_refused(result: "subprocess.CompletedProcess[str]", *words: str) -> None:
    """One line that says all of `words`, and nothing was begun."""
    assert result.returncode == 1
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1, result.stderr
    for word in words:
        assert word in result.stderr


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert [path.name for path in (tmp_path / "checkout").iterdir()] == ["tools"]


@pytest.mark.parametrize("version", ["glibc 2.34", "glibc 2.9", "glibc 2.17.1", "glibc 1.99"])
def test_an_old_c_library(machine: Machine, version: str) -> None:
    told = machine(getconf=f"echo {version}")
    assert_refused(told, f"The C library is {version}", "glibc 2.35", "Debian 12", "Ubuntu 22.04")


@pytest.mark.parametrize("getconf", ["exit 1", "echo undefined; exit 1", "echo undefined"])
def test_another_c_library(machine: Machine, getconf: str) -> None:
    assert_refused(machine(getconf=getconf), "The C library is", "glibc 2.35", "Debian 12")


@pytest.mark.parametrize("version", ["glibc 2.35", "glibc 2.36", "glibc 2.100", "glibc 2.39-0ubuntu8"])
def test_a_new_c_library_is_no_lack(machine: Machine, version: str) -> None:
    assert "C library" not in machine(getconf=f"echo {version}").stderr


def test_another_processor(machine: Machine) -> None:
    assert_refused(machine(uname="echo aarch64"), "This machine is aarch64", "x86_64", "use a machine")


def test_a_folder_that_cannot_be_written(machine: Machine, tmp_path: Path) -> None:
    """The double fails as mktemp does in a read-only folder, for root may write anywhere."""
    told = machine(mktemp="echo mktemp: Read-only file system >&2; exit 1")
    assert_refused(told, f"{tmp_path / 'checkout'} cannot be written", "make it writable")


def test_no_usable_python(machine: Machine) -> None:
    told = machine()
    assert_refused(told, "Python 3.11 or 3.12", "python3.11-venv and libpython3.11 (Debian 12)", "uv")


def test_uv_stands_in_where_no_python_is_usable(machine: Machine, tmp_path: Path) -> None:
    told = machine(uv='echo "$*" >>"$LOG"; exit 7')
    assert told.returncode == 7
    (call,) = (tmp_path / "log").read_text().splitlines()
    assert call.startswith("venv ")
    assert "--python 3.12" in call


def test_an_interpreter_that_was_named_is_the_only_one_tried(machine: Machine, tmp_path: Path) -> None:
    told = machine(python="mine", mine=UNUSABLE, python3='echo python3 >>"$LOG"', uv='echo uv >>"$LOG"')
    assert_refused(told, "Python 3.11 or 3.12")
    assert not (tmp_path / "log").exists()
