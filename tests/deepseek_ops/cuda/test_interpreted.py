"""What the operators launch computes what it should: C++ plans, Triton-language kernels, float64."""

import os
import subprocess
import sys
from pathlib import Path

from cuda_cases import SMALL_CASES


def test_operators_agree_with_float64_in_the_interpreter(named_library: Path, driver: Path) -> None:
    """In float16: the interpreter computes bfloat16 wrongly."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("interpreted.py")), str(named_library), str(driver), "1"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert len(done.stdout.splitlines()) == len(SMALL_CASES)
