"""The server's log is put aside while the server writes into it."""

import errno
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from piccard.server_log import put_aside

WRITES = """
import sys
for line in sys.stdin:
    print(line, end="", flush=True)
    print("done", file=sys.stderr, flush=True)
"""


def test_a_process_goes_on_in_the_emptied_log(tmp_path: Path) -> None:
    log = tmp_path / "tritonserver.log"
    with open(log, "ab") as file:
        server = subprocess.Popen(
            [sys.executable, "-c", WRITES], stdin=subprocess.PIPE, stdout=file, stderr=subprocess.PIPE, text=True
        )

    def write(line: str) -> None:
        assert server.stdin is not None
        assert server.stderr is not None
        server.stdin.write(f"{line}\n")
        server.stdin.flush()
        assert server.stderr.readline() == "done\n"

    try:
        write("first")
        assert not put_aside(log, largest=6)
        write("second")
        assert put_aside(log, largest=6)
        write("third")
        assert log.read_text() == "third\n"
        assert (tmp_path / "tritonserver.log.1").read_text() == "first\nsecond\n"
        assert put_aside(log, largest=5)
        assert (tmp_path / "tritonserver.log.1").read_text() == "third\n"
    finally:
        server.communicate("")


def test_a_log_that_is_not_there_is_no_error(tmp_path: Path) -> None:
    assert not put_aside(tmp_path / "tritonserver.log", largest=0)


def test_a_log_is_kept_where_the_copy_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "tritonserver.log"
    log.write_text("everything")

    def full(*_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OSError, match="No space"):
        put_aside(log, largest=1)
    assert log.read_text() == "everything"
