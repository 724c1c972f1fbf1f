"""Whether MPS is on is told by who reads its control pipe."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from operations import operation_of
from piccard import doctor
from piccard.mps import DEFAULT_FOLDER, environment_of, has_gpu, is_on, mps_note, pipe_folder
from piccard_contract.home import Service


def nothing(folder: Path) -> None:
    pass


def left_behind(folder: Path) -> None:
    os.mkfifo(folder / "control")


def plain_file(folder: Path) -> None:
    (folder / "control").write_text("")


def dead_socket(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "control"))


@pytest.mark.parametrize("lay", [nothing, left_behind, plain_file, dead_socket])
def test_it_is_off_without_a_daemon(tmp_path: Path, lay: Callable[[Path], None]) -> None:
    lay(tmp_path)
    assert not is_on(tmp_path)
    note = mps_note({"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)})
    assert "is off" in note
    assert "take turns" in note
    assert str(tmp_path) in note


def test_it_is_on_while_a_daemon_reads_its_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "control")
    reader = os.open(tmp_path / "control", os.O_RDONLY | os.O_NONBLOCK)
    assert is_on(tmp_path)
    assert "is on" in mps_note({"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)})
    # Nothing was written to it.
    assert os.read(reader, 1) == b""
    os.close(reader)
    assert not is_on(tmp_path)


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_it_is_on_while_a_daemon_listens(tmp_path: Path, kind: socket.SocketKind) -> None:
    with socket.socket(socket.AF_UNIX, kind) as server:
        server.bind(str(tmp_path / "control"))
        server.listen()
        assert is_on(tmp_path)
    assert not is_on(tmp_path)


def test_the_folder_is_that_of_the_process_that_asks() -> None:
    assert pipe_folder({}) == pipe_folder({"CUDA_MPS_PIPE_DIRECTORY": ""}) == Path(DEFAULT_FOLDER)
    wait = "import sys; print(flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", wait], env={"CUDA_MPS_PIPE_DIRECTORY": "/x=y"}, **pipes) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert pipe_folder(environment_of(process.pid)) == Path("/x=y")
        process.communicate()
    assert environment_of(process.pid) is os.environ


def test_a_gpu_is_seen_by_its_device(tmp_path: Path) -> None:
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-caps", "nvidia-modeset"):
        (tmp_path / name).touch()
    assert not has_gpu(tmp_path)
    (tmp_path / "nvidia12").touch()
    assert has_gpu(tmp_path)


@pytest.mark.parametrize("there", [True, False])
def test_doctor_tells_of_it_where_there_is_a_gpu(
    service: Service, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    monkeypatch.setattr(doctor, "has_gpu", lambda: there)
    told = [note for note in doctor.notes(operation_of(service)) if "MPS" in note]
    assert len(told) == there
