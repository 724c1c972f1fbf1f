import os
from pathlib import Path

import pytest
from deepseek_engine.cpu_threads import available_processors, compute_threads


def test_one_processor_is_left_for_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("deepseek_engine.cpu_threads.available_processors", lambda: 8)
    assert compute_threads() == 7
    monkeypatch.setattr("deepseek_engine.cpu_threads.available_processors", lambda: 1)
    assert compute_threads() == 1


def test_the_environment_overrides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert compute_threads() == 5


@pytest.mark.parametrize(("text", "expected"), [("200000 100000", 2), ("50000 100000", 1), ("max 100000", 4), ("", 4)])
def test_a_quota_of_the_control_group_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    (tmp_path / "cpu.max").write_text(text)
    assert available_processors(tmp_path / "cpu.max") == expected


def test_without_a_control_group_the_affinity_counts(tmp_path: Path) -> None:
    assert available_processors(tmp_path / "missing") == len(os.sched_getaffinity(0))
