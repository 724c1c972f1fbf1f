"""Homes without a server."""

import contextlib
import hashlib
import io
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from piccard.__main__ import main
from piccard_contract.home import Service
from piccard_server import make_scripted_home


@pytest.fixture
def service(tmp_path: Path) -> Service:
    """A home with scripted versions 1 (stable) and 2 (canary at 10 %)."""
    return make_scripted_home(tmp_path / "home")


@pytest.fixture
def tree_hash() -> Callable[[Path], str]:
    """A hash over names, kinds, times and contents of everything in a folder."""

    def of(folder: Path) -> str:
        digest = hashlib.sha256()
        for path in sorted(folder.rglob("*")):
            status = path.lstat()
            digest.update(f"{path}\0{status.st_mode}\0{status.st_mtime_ns}\0".encode())
            if path.is_symlink():
                digest.update(str(path.readlink()).encode())
            elif path.is_file():
                digest.update(path.read_bytes())
        return digest.hexdigest()

    return of


Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def command_line() -> Command:
    """Runs the command line within this process: `command_line("promote", "2", "--home=...")`."""

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        out, err, code = io.StringIO(), io.StringIO(), 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main([*arguments])
            except SystemExit as end:
                code = int(end.code or 0)
        return subprocess.CompletedProcess(list(arguments), code, out.getvalue(), err.getvalue())

    return run


@pytest.fixture
def piccard(command_line: Command) -> Command:
    """The same against a home: `piccard(home, "promote", "2", check=True)`."""

    def run(home: Path, *arguments: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        result = command_line(*arguments, f"--home={home}")
        if check:
            assert result.returncode == 0, f"piccard {' '.join(arguments)}:\n{result.stdout}{result.stderr}"
        return result

    return run
