"""Each missing prerequisite is one sentence with its remedy."""

import os
import socket
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from piccard import prerequisites
from piccard.server_settings import ServerSettings
from piccard.triton_binary import Origin, TritonInstall, find_triton, python_version
from piccard_contract.home import Service
from piccard_contract.process_lock import ProcessLock
from piccard_server import free_ports


def settings() -> ServerSettings:
    return ServerSettings("127.0.0.1", *free_ports(4))


def assert_sentence(problem: str | None, *words: str) -> None:
    assert problem is not None
    assert "\n" not in problem
    for word in words:
        assert word in problem


def test_this_machine_lacks_nothing(service: Service) -> None:
    assert prerequisites.problems(find_triton(), settings(), service.home, processes=5) == []


def test_python() -> None:
    assert prerequisites.python_problem("3.12") is None
    assert_sentence(prerequisites.python_problem("3.13"), "3.13", "3.11 or 3.12", "install")


def test_server_missing() -> None:
    assert_sentence(prerequisites.triton_problem(None), "tritonserver", "pip install nvidia-pytriton")


def test_server_not_executable(tmp_path: Path) -> None:
    (tmp_path / "tritonserver").touch(0o644)
    install = TritonInstall(Origin.INSTALLED, tmp_path / "tritonserver", tmp_path)
    if os.getuid() == 0:
        # root may execute what anybody may, and nobody may execute this.
        assert not os.access(install.binary, os.X_OK)
    assert_sentence(prerequisites.triton_problem(install), "chmod +x")


@pytest.mark.parametrize(("found", "fits"), [((2, 34), False), ((2, 35), True), ((2, 36), True), ((), False)])
def test_glibc(found: tuple[int, ...], fits: bool) -> None:
    problem = prerequisites.glibc_problem(found)
    if fits:
        assert problem is None
    else:
        assert_sentence(problem, "glibc", "2.35", "Debian 12")


def test_shared_libpython(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prerequisites.libpython_problem() is None
    monkeypatch.setattr(prerequisites, "shared_libpython", lambda: None)
    assert_sentence(prerequisites.libpython_problem(), f"libpython{python_version()}", "install")


def test_numpy() -> None:
    assert prerequisites.numpy_problem("1.26.4") is None
    assert_sentence(prerequisites.numpy_problem("2.1.0"), "numpy is 2.1.0", "pip install 'numpy<2'")


def test_numpy_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(prerequisites, "version", version)
    assert_sentence(prerequisites.numpy_problem(), "numpy is not installed", "make serve")


def test_stub_of_another_python(tmp_path: Path) -> None:
    stub = tmp_path / "python" / "triton_python_backend_stub"
    stub.parent.mkdir()
    install = TritonInstall(Origin.INSTALLED, tmp_path / "tritonserver", tmp_path)
    assert_sentence(prerequisites.stub_problem(install), "without the Python backend")
    stub.write_bytes(b"...\0libpython3.10.so.1.0\0...")
    assert_sentence(prerequisites.stub_problem(install), "runs Python 3.10", "install Piccard under Python 3.10")
    stub.write_bytes(f"...\0libpython{python_version()}.so.1.0\0...".encode())
    assert prerequisites.stub_problem(install) is None


def test_wheel_without_a_stub_for_this_python(tmp_path: Path) -> None:
    install = TritonInstall(Origin.WHEEL, tmp_path / "tritonserver", tmp_path, tmp_path / "stubs", tmp_path)
    assert_sentence(prerequisites.stub_problem(install), "no stub for Python")


def test_home_missing_and_read_only(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert prerequisites.home_problem(service.home) is None
    assert_sentence(prerequisites.home_problem(tmp_path / "none"), "is missing", "piccard init")
    monkeypatch.setattr(prerequisites, "_read_only_mount", lambda folder: folder.name == "state")
    assert_sentence(prerequisites.home_problem(service.home), "state is read-only", "--home")


def test_shared_memory() -> None:
    assert prerequisites.shared_memory_problem(5, free=64 * 2**20) is None
    assert_sentence(prerequisites.shared_memory_problem(20, free=64 * 2**20), "64 MiB", "160 MiB", "--shm-size")


def test_taken_and_doubled_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        others = free_ports(3)
        (problem,) = prerequisites.port_problems(ServerSettings("127.0.0.1", port, *others))
        assert_sentence(problem, f"port {port} of 127.0.0.1", "--http-port")
    (problem,) = prerequisites.port_problems(ServerSettings("127.0.0.1", others[0], *others))
    assert_sentence(problem, "--http-port and --grpc-port are both")


def test_address_that_is_not_this_machine_s() -> None:
    found = list(prerequisites.port_problems(ServerSettings("192.0.2.1", *free_ports(4))))
    assert len(found) == 4
    assert_sentence(found[0], "192.0.2.1")


def test_the_port_of_a_gateway_that_was_left_is_no_problem(tmp_path: Path) -> None:
    """Nothing else of a killed start may run; the gateway ends when the next supervisor tells it to."""
    service = Service(tmp_path)
    service.gateway_lock.parent.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = ServerSettings("127.0.0.1", *free_ports(4), gateway_port=taken.getsockname()[1])

        def told() -> bool:
            return any("--gateway-port" in problem for problem in prerequisites.problems(None, settings, tmp_path, 1))

        assert told()
        lock = ProcessLock(service.gateway_lock)
        lock.acquire(timeout=1.0)
        try:
            assert not told()
        finally:
            lock.release()
