"""The soak in short: benchmarks/soak.py for half a minute, at bounds of growth that hold on a busy machine too."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from piccard_server import RunningServer, wait_for
from short_calls import answers_gateway
from soak_requests import ABNORMAL, NORMAL, WHOLE
from soak_run import soak

SECONDS = 30.0
WARM_UP = 10.0
USERS = 12

# MiB of memory, threads and descriptors, and MiB of shared memory that a process may take on in so short a time.
ALLOWED = {"resident": 48.0, "threads": 8.0, "descriptors": 40.0, "shared-memory MiB": 16.0}


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[RunningServer]:
    """A server of the demo checkpoint on both runners, with its gateway."""
    home = tmp_path / "home"
    subprocess.run([sys.executable, "-m", "piccard", "init", str(home)], check=True, stdout=subprocess.DEVNULL)
    running = RunningServer(home, "--gateway")
    try:
        running.wait_ready(300)
        wait_for(lambda: answers_gateway(running), 60, "the gateway")
        yield running
    finally:
        running.stop()


@pytest.mark.timeout(900)
def test_full_load_with_abnormal_requests(serving: RunningServer) -> None:
    found = soak(serving, seconds=SECONDS, warm_up=WARM_UP, users=USERS)

    assert found.wrong == []
    assert found.counts(NORMAL)[WHOLE] > found.counts(ABNORMAL).total() > 0
    first, last = found.warm[0][2], found.warm[-1][2]
    rises = {name: last[name] - value for name, value in first.items()}
    grew = {
        name: rise
        for name, rise in rises.items()
        for prefix, most in ALLOWED.items()
        if name.startswith(prefix) and rise > most
    }
    assert grew == {}
