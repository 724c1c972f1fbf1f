"""`make bench` runs every benchmark that fits the machine, goes on after one that fails, and tells of it."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
# They need CUDA and are run where that is there.
GPU_BENCHMARKS = ["kernels", "gpu_engine", "gpu_service"]

# (target, whether there is a GPU, the benchmark that fails) -> (exit code, names of what was run, what was told)
Make = Callable[..., tuple[int, list[str], str]]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Runs a target with a double of Python, which notes what it was to run."""

    def run(target: str, *, gpu: bool = False, failing: str = "none") -> tuple[int, list[str], str]:
        log = tmp_path / "log"
        log.write_text("")
        python = tmp_path / "python"
        python.write_text(
            f'#!/bin/sh\nif [ "$1" = -c ]; then exit {int(not gpu)}; fi\n'
            f'echo "$1" >>"{log}"\n[ "$1" != "benchmarks/{failing}.py" ]\n'
        )
        python.chmod(0o755)
        result = subprocess.run(
            ["make", "--no-print-directory", "--assume-old=.venv/.dev", target, f"BIN={tmp_path}"],
            cwd=REPOSITORY,
            # A make that runs these tests has settings of its own for the makes that it starts.
            env={"PATH": "/usr/local/bin:/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return result.returncode, [Path(line).stem for line in log.read_text().splitlines()], result.stderr

    return run


def test_every_script_is_run_by_one_target(make: Make) -> None:
    benches, soaks = make("bench", gpu=True)[1], make("soak")[1]
    scripts = [path for path in (REPOSITORY / "benchmarks").glob("*.py") if "__main__" in path.read_text()]
    assert sorted(benches + soaks) == sorted(path.stem for path in scripts)
    assert soaks[-1] == "leaks"


def test_some_need_a_gpu(make: Make) -> None:
    code, without, _ = make("bench")
    assert code == 0
    assert not set(GPU_BENCHMARKS) & set(without)
    assert make("bench", gpu=True)[1] == [*without, *GPU_BENCHMARKS]


@pytest.mark.parametrize("target", ["bench", "soak"])
def test_a_failure_stops_no_other_and_counts(make: Make, target: str) -> None:
    _, names, _ = make(target)
    code, run, told = make(target, failing=names[0])
    assert code != 0
    assert run == names
    assert f"failed: {names[0]}" in told
