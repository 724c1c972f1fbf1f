"""The operators' library, built once a session and kept for the next by what it is made of."""

import shutil
from pathlib import Path

import pytest
from deepseek_ops.build import COMPILERS, build

BUILD_SECONDS = 1500
"""A limit for the tests that may wait for the compiler, far above what it takes on a busy machine."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(BUILD_SECONDS))


@pytest.fixture(scope="session")
def library() -> Path:
    if not any(shutil.which(name) for name in COMPILERS):
        pytest.skip("no C++ compiler on this machine")
    return build()
