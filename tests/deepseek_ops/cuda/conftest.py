"""The CUDA operators where there is no GPU."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from deepseek_ops.build import COMPILERS, default_folder
from fake_cuda import FakeCuda, build_fake_cuda, build_named_images


@pytest.fixture(scope="session")
def named_library() -> Path:
    """The operators for the CPU provider with names for binaries, kept for the next session by what they are of."""
    if not any(shutil.which(name) for name in COMPILERS):
        pytest.skip("no C++ compiler on this machine")
    return build_named_images(default_folder() / "named")


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake driver."""
    return build_fake_cuda(tmp_path_factory.mktemp("fake_cuda"))


@pytest.fixture(scope="session")
def _cuda(driver: Path) -> FakeCuda:
    return FakeCuda(driver)


@pytest.fixture
def cuda(_cuda: FakeCuda) -> Iterator[FakeCuda]:
    """This process's fake driver, which records."""
    _cuda.clear()
    yield _cuda
    assert not _cuda.errors
