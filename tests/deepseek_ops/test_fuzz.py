"""Malformed inputs end in an error that the operator tells, never in a crash."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from deepseek_ops.build import build, find_compiler
from deepseek_ops.operators import operators_on
from deepseek_ops.registry import CPU
from operator_fuzz import fuzz

SUPPORT = Path(__file__).resolve().parents[1] / "support"
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g1", "-O1")


@pytest.mark.parametrize("name", [operator.name for operator in operators_on(CPU)])
def test_malformed_inputs_give_errors(library: Path, name: str) -> None:
    outcomes = [fuzz(library, name, seed) for seed in range(60)]
    assert sum(outcome != "ran" for outcome in outcomes) >= 10


def test_nothing_is_read_or_written_out_of_bounds(library: Path, tmp_path: Path) -> None:
    """The same calls, and sound ones, with the library built under the address and undefined-behaviour sanitizers."""
    runtimes = [_runtime(name) for name in ("libasan.so", "libubsan.so")]
    if not all(path.is_absolute() for path in runtimes):
        pytest.skip("the compiler has no sanitizers")
    sanitized = build(tmp_path / "sanitized", extra_flags=(*SANITIZERS, *_strict_bounds()))
    environment = {
        **os.environ,
        "LD_PRELOAD": ":".join(map(str, runtimes)),
        # What Python and ONNX Runtime keep to the end is not this library's.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": str(SUPPORT),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "operator_fuzz.py"), str(sanitized), "12"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=1200,
    )
    assert done.stdout.endswith("done\n"), (done.stdout + done.stderr)[-6000:]


def _strict_bounds() -> list[str]:
    """With gcc, that an array at the end of a struct is checked too: else it counts as one of no fixed size."""
    flag = "-fsanitize=bounds-strict"
    command = [find_compiler(), flag, "-fsyntax-only", "-x", "c++", os.devnull]
    return [] if subprocess.run(command, capture_output=True).returncode else [flag]


def _runtime(name: str) -> Path:
    """Where the compiler keeps a sanitizer's runtime; the bare name where it has none."""
    found = subprocess.run([find_compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return Path(found.stdout.strip())
