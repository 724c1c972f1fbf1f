import pytest
from deepseek_engine.memory_budget import MemoryBudgetError, cache_bytes, host_memory, memory_bytes

GIB = 2**30


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (0.5, 8 * GIB),
        (1.0, 16 * GIB),
        ("8GiB", 8 * GIB),
        ("1.5GiB", 3 * GIB // 2),
        ("512MiB", GIB // 2),
        ("2TiB", 2048 * GIB),
    ],
)
def test_shares_and_amounts(memory: float | str, expected: int) -> None:
    assert memory_bytes(memory, 16 * GIB) == expected


def test_the_cache_gets_what_the_weights_leave() -> None:
    assert cache_bytes("8GiB", on_gpu=True, total=16 * GIB, weights=3 * GIB) == 5 * GIB
    assert cache_bytes(0.5, on_gpu=False, total=16 * GIB, weights=GIB) == 7 * GIB


def test_without_a_setting_a_gpu_is_shared_and_a_cpu_gives_a_gibibyte() -> None:
    assert cache_bytes(None, on_gpu=True, total=10 * GIB, weights=GIB) == 9 * GIB // 2 - GIB
    assert cache_bytes(None, on_gpu=False, total=16 * GIB, weights=100 * GIB) == GIB
    assert cache_bytes(None, on_gpu=False, total=2 * GIB, weights=0) == GIB // 2


def test_weights_that_leave_nothing_are_named() -> None:
    with pytest.raises(MemoryBudgetError, match=r"2\.00 GiB.*3\.00 GiB"):
        cache_bytes("2GiB", on_gpu=False, total=16 * GIB, weights=3 * GIB)


def test_the_host_has_memory() -> None:
    assert host_memory() > 2**27
