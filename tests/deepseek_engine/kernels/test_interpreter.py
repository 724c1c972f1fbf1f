"""Runs the tests of device kernels, and of what runs on them, in Triton's interpreter, one process a file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ENGINE = Path(__file__).parents[1]
FILES = sorted(
    [
        *ENGINE.glob("kernels/test_*_triton.py"),
        *ENGINE.glob("gpu/test_*_triton.py"),
        *ENGINE.glob("runners/test_cuda*.py"),
    ]
)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_passes_in_the_interpreter(file: Path, pytestconfig: pytest.Config) -> None:
    names = ("--hypothesis-profile", "--hypothesis-seed")
    explored = [f"{name}={value}" for name in names if (value := pytestconfig.getoption(name)) is not None]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not gpu", *explored, str(file)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=ENGINE.parents[1],
        capture_output=True,
        text=True,
        timeout=1100,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
