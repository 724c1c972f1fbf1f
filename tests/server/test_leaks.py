"""What comes and goes leaves nothing: benchmarks/leaks.py in short, at bounds that hold on a busy machine too."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from footprint import Footprint
from growth import growths
from leak_run import sampled_cycles, sampled_requests
from piccard_contract.lifecycle import KEPT_RETIRED
from piccard_server import RunningServer, make_scripted_home

# Until so many are retired, each of them is kept.
WARM = KEPT_RETIRED + 1
CYCLES = WARM + 8
REQUESTS = 900

# MiB that memory may rise by in so short a time, in which heaps have not come to rest.
MEMORY = 24.0
# Threads and descriptors: connections and streams come and go.
FEW = 12.0


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    running = RunningServer(make_scripted_home(tmp_path_factory.mktemp("leaks")).home)
    try:
        yield running.wait_ready()
    finally:
        running.stop()


def rises(before: Footprint, after: Footprint) -> dict[str, float]:
    """By how much what may not rise did, beyond what is allowed here."""
    allowed = {"resident": MEMORY, "threads": FEW, "descriptors": FEW, "shared-memory MiB": 8.0, "disk": 1.0}
    allowed |= {
        "lines of /metrics": 1000.0,
        "lines of the server's own": 4.0 * CYCLES,
        "entries": float(CYCLES),
        "state.json": 1.0,
    }
    found = {}
    for name, value in after.items():
        rise = value - before.get(name, 0.0)
        most = max((amount for prefix, amount in allowed.items() if name.startswith(prefix)), default=0.0)
        if rise > most:
            found[name] = rise
    return found


@pytest.mark.timeout(1800)
def test_versions_that_come_and_go(lasting: RunningServer) -> None:
    samples = dict(sampled_cycles(lasting, CYCLES, 1))

    assert rises(samples[WARM], samples[CYCLES]) == {}
    assert samples[CYCLES]["processes"] == samples[0]["processes"]
    # Kept are the two that serve and the last that were retired.
    assert len(lasting.state().versions) == 2 + KEPT_RETIRED
    assert samples[CYCLES]["files of staging"] == 0
    # The bound of memory is that above: in so few cycles its steps cannot be told from a slope.
    warmed = [(cycle, sample) for cycle, sample in samples.items() if cycle >= WARM]
    assert [found for found in growths(warmed, {}) if found.grew and not found.name.startswith("resident")] == []


@pytest.mark.timeout(1800)
def test_requests_a_tenth_of_which_is_cancelled(lasting: RunningServer) -> None:
    samples = sampled_requests(lasting, REQUESTS, REQUESTS // 3)

    assert rises(samples[1][1], samples[-1][1]) == {}


def test_each_process_has_the_descriptors_that_it_opened(lasting: RunningServer) -> None:
    """The server forks versions with the connections of its clients in hand (see inherited_sockets)."""
    for owner in ("version-1", "version-2", "router", "router_unary", "admission"):
        held = [path.readlink().name for path in Path(f"/proc/{lasting.pid(owner)}/fd").iterdir()]
        assert not [name for name in held if name.startswith("socket:")], owner
