"""Puts tests/support on the path, says how properties are tested, and offers the fixtures that several areas share."""

import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent / "support"))

# How long an example takes is no property: a busy machine may take any time.
_PATIENT = {"deadline": None, "print_blob": True, "suppress_health_check": [HealthCheck.too_slow]}
# The same examples at every run, so that a change is judged by what it changes.
settings.register_profile("same", derandomize=True, **_PATIENT)
# Others at every run, to look for what nobody thought of (CONTRIBUTING.md).
settings.register_profile("explore", derandomize=False, **_PATIENT)
settings.load_profile("same")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Called where several processes share the tests."""
    from shares import Shares

    return Shares(config, log)


@pytest.fixture(autouse=True)
def _closes_nothing_of_others() -> Iterator[None]:
    """A test that closes what it did not open harms the tests after it, and the process that runs them all."""
    with socket.socket() as other:
        before = os.fstat(other.fileno()).st_ino
        yield
        try:
            after = os.fstat(other.fileno()).st_ino
        except OSError:
            after = None
        if after != before:
            # Its descriptor is gone, or another's by now.
            other.detach()
        assert after == before, "the test closed descriptors that it had not opened"


@pytest.fixture
def models_keep_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that are imported after this do not take the sockets of this process for inherited ones."""
    from piccard_contract import inherited_sockets

    monkeypatch.setattr(inherited_sockets, "close_inherited_sockets", lambda: 0)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """What torch draws does not depend on the tests that ran before in the same process."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def checkpoint_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a small random checkpoint of a family (random_checkpoints.FAMILIES), made once a session."""
    from random_checkpoints import make_checkpoint

    folders: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in folders:
            folders[family] = make_checkpoint(family, tmp_path_factory.mktemp(family))
        return folders[family]

    return folder


@pytest.fixture(scope="session")
def checkpoint(checkpoint_folder: Callable[[str], Path]) -> Path:
    """A random V3 checkpoint with a tokenizer of bytes; tests only read it."""
    from toy_tokenizer import write_toy_tokenizer

    folder = checkpoint_folder("v3")
    write_toy_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def library() -> Path:
    """The com.deepseek operators, built once a session and kept for the next by what they are made of."""
    import shutil

    from deepseek_ops.build import COMPILERS, build

    if not any(shutil.which(name) for name in COMPILERS):
        pytest.skip("no C++ compiler on this machine")
    return build()


@pytest.fixture(scope="session")
def export_folder(
    checkpoint_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """The export of a family's small random checkpoint, made once a session."""
    from deepseek_ops.exporter.export import export

    folders: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in folders:
            folders[family] = export(checkpoint_folder(family), tmp_path_factory.mktemp("exports") / family)
        return folders[family]

    return folder
