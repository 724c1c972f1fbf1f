"""Where tritonserver is found: on PATH, else where containers have it, else in the wheel."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
from piccard import triton_binary
from piccard.prerequisites import problems
from piccard.server_settings import ServerSettings
from piccard.triton_binary import STUB_NAME, Origin, find_triton, prepare_backends, python_version, server_environment
from piccard_contract.home import Service
from ports import free_ports


def make_server(folder: Path, *, python: str = python_version()) -> Path:
    """An installation as NVIDIA's images have it, with a stub for `python`; its executable."""
    binary = folder / "bin" / "tritonserver"
    binary.parent.mkdir(parents=True)
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    backend = folder / "backends" / "python"
    backend.mkdir(parents=True)
    (backend / STUB_NAME).write_bytes(b"\x7fELF libpython" + python.encode() + b".so.1.0")
    return binary


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for /opt/tritonserver and is not there yet; PATH has no tritonserver either."""
    folder = tmp_path / "opt" / "tritonserver"
    monkeypatch.setattr(triton_binary, "CONTAINER_FOLDER", folder)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    return folder


def test_the_one_on_path_comes_first(container: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_server(container)
    binary = make_server(tmp_path / "elsewhere")
    monkeypatch.setenv("PATH", str(binary.parent))
    found = find_triton()
    assert found is not None
    assert (found.origin, found.binary, found.stubs, found.libraries) == (Origin.INSTALLED, binary, None, None)
    assert found.backends == tmp_path / "elsewhere" / "backends"


def test_a_link_on_path_is_followed_to_its_backends(
    container: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = make_server(tmp_path / "elsewhere")
    link = tmp_path / "bin" / "tritonserver"
    link.parent.mkdir()
    link.symlink_to(binary)
    monkeypatch.setenv("PATH", str(link.parent))
    found = find_triton()
    assert found is not None
    assert (found.binary, found.backends) == (binary, tmp_path / "elsewhere" / "backends")


def test_the_container_s_comes_before_the_wheel_s(container: Path, tmp_path: Path) -> None:
    binary = make_server(container)
    found = find_triton()
    assert found is not None
    assert (found.origin, found.binary, found.backends) == (Origin.INSTALLED, binary, container / "backends")
    # It is used as it is: no backends are copied and no libraries added.
    assert prepare_backends(found, tmp_path / "run") == container / "backends"
    assert not (tmp_path / "run").exists()


def test_an_installed_server_keeps_its_libraries(container: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_server(container)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    found = find_triton()
    assert found is not None
    assert "LD_LIBRARY_PATH" not in server_environment(found)


def test_the_wheel_s_is_the_last(container: Path) -> None:
    found = find_triton()
    assert found is not None
    assert found.origin is Origin.WHEEL
    assert found.binary.is_file()


def test_what_cannot_be_executed_is_passed_over(container: Path) -> None:
    make_server(container).chmod(0o644)
    found = find_triton()
    assert found is not None
    assert found.origin is Origin.WHEEL


def test_the_wheel_s_on_path_is_still_the_wheel_s(container: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = find_triton()
    assert wheel is not None
    monkeypatch.setenv("PATH", str(wheel.binary.parent))
    assert find_triton() == wheel


@pytest.mark.parametrize("empty", [False, True], ids=["no wheel", "a wheel without its server"])
def test_none_anywhere(container: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty: bool) -> None:
    spec = SimpleNamespace(origin=str(tmp_path / "pytriton" / "__init__.py")) if empty else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert find_triton() is None


def sentences(service: Service) -> list[str]:
    return problems(find_triton(), ServerSettings("127.0.0.1", *free_ports(4)), service.home, processes=5)


def test_nothing_is_wrong_with_a_whole_installation(container: Path, service: Service) -> None:
    make_server(container)
    assert sentences(service) == []


def test_an_installation_without_its_python_backend(container: Path, service: Service) -> None:
    make_server(container)
    (container / "backends" / "python" / STUB_NAME).unlink()
    (told,) = sentences(service)
    assert "comes without the Python backend" in told
    assert str(container / "backends" / "python" / STUB_NAME) in told
    assert "use an image that has it" in told


def test_an_installation_for_another_python(container: Path, service: Service) -> None:
    make_server(container, python="3.10")
    (told,) = sentences(service)
    assert "runs Python 3.10" in told
    assert "install Piccard under Python 3.10" in told
