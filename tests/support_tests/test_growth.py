"""Growth is told from noise, steps and saw teeth."""

import random

import pytest
from growth import PER_CYCLE, PER_REQUEST, growth, growths, table
from hypothesis import example, given
from hypothesis import strategies as st

ROUTER = "resident MiB of router"


def series(rise: float, noise: float = 0.0, count: int = 50, uses: int = 20_000) -> list[tuple[float, float]]:
    """A process of 80 MiB that warms up in its first tenth and then rises by `rise` MiB in all."""
    drawn = random.Random(7)
    step = uses // count
    points = [(0.0, 60.0)]
    for index in range(1, count + 1):
        points.append((float(index * step), 80.0 + rise * index / count + drawn.uniform(-noise, noise)))
    return points


def test_a_warm_up_is_no_growth() -> None:
    found = growth(ROUTER, series(0.0), PER_REQUEST)
    assert found.rise == 0
    assert not found.grew


def test_steps_of_a_heap_are_no_growth() -> None:
    points = series(0.0)
    stepped = [(at, value + (2.5 if at > 9_000 else 0.0) + (3.0 if at > 15_000 else 0.0)) for at, value in points]
    assert not growth(ROUTER, stepped, PER_REQUEST).grew
    # So many steps are.
    assert growth(ROUTER, [(at, value * (1 + at / 50_000)) for at, value in points], PER_REQUEST).grew
    assert growth(ROUTER, [(at, value + 20.0 * (at > 9_000)) for at, value in points], PER_REQUEST).grew


def test_a_record_kept_of_each_request_is_growth() -> None:
    # Half a KiB each.
    assert growth(ROUTER, series(20_000 * 512 / 2**20, noise=0.5), PER_REQUEST).grew
    assert not growth(ROUTER, series(20_000 * 100 / 2**20, noise=0.5), PER_REQUEST).grew


def test_the_server_may_keep_an_entry_of_each_version_and_others_may_not() -> None:
    points = series(500 * 26 / 1024, uses=500)
    assert not growth("resident MiB of tritonserver", points, PER_CYCLE).grew
    assert growth(ROUTER, points, PER_CYCLE).grew


@pytest.mark.parametrize("name", ["processes", "files of the home", "sections of the live state"])
def test_one_thing_more_a_hundred_uses_is_growth(name: str) -> None:
    points = [(float(index), 5.0 + index // 100) for index in range(0, 501, 5)]
    assert growth(name, points, PER_CYCLE).grew


def test_a_saw_tooth_is_no_growth() -> None:
    points = [(float(index), 1000.0 + 65 * (index % 12)) for index in range(0, 500, 5)]
    assert not growth("lines of /metrics", points, PER_CYCLE).grew
    assert growth("lines of /metrics", [(at, value + 10 * at) for at, value in points], PER_CYCLE).grew


@given(st.integers(0, 40), st.floats(-1e4, 1e4))
@example(0, -1e3)
@example(40, 1e3)
def test_one_odd_sample_turns_nothing(index: int, value: float) -> None:
    points = series(0.0, noise=0.1)
    points[10 + index] = points[10 + index][0], value
    assert not growth(ROUTER, points, PER_REQUEST).grew


def test_the_table_names_what_grew() -> None:
    samples = [(at, {"processes": 7.0 + at // 10, "disk MiB of the logs": float(at)}) for at in range(100)]
    lines = table(growths(samples, PER_REQUEST)).splitlines()
    assert [line for line in lines if line.endswith("GREW")] == [lines[1]]
    # Logs grow until they are put aside.
    assert lines[2].startswith("disk MiB of the logs")
