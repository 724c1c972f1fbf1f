"""The operators' library, built once a session and kept for the next by what it is made of."""

import shutil
from pathlib import Path

import pytest
from deepseek_ops.build import COMPILERS, build


@pytest.fixture(scope="session")
def library() -> Path:
    if not any(shutil.which(name) for name in COMPILERS):
        pytest.skip("no C++ compiler on this machine")
    return build()
