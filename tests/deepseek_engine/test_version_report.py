from collections.abc import Iterator
from pathlib import Path

import pytest
from deepseek_engine.request import EngineStats
from deepseek_engine.version_metrics import VersionMetrics
from deepseek_engine.version_report import ReportPublisher
from patience import wait_until
from piccard_contract.live_state import LiveState
from piccard_contract.metrics import METRICS
from piccard_contract.process_lock import ProcessLock
from piccard_contract.reports import VersionReport


@pytest.fixture
def state(tmp_path: Path) -> Iterator[LiveState]:
    """A state file of which this process is version 1."""
    lock = ProcessLock(tmp_path / "version-1.lock")
    lock.acquire()
    yield LiveState(tmp_path / "live.state", tmp_path)
    lock.release()


def stats(**fields: int) -> EngineStats:
    known = dict.fromkeys(EngineStats.__dataclass_fields__, 0)
    return EngineStats(**{**known, **fields})


def test_changes_and_figures_reach_the_section(state: LiveState) -> None:
    publisher = ReportPublisher(state.writer("version-1"), VersionReport(version=1))

    def read() -> VersionReport:
        section = state.read("version-1")
        assert section is not None
        return VersionReport.model_validate(section.data)

    assert read().phase == "loading"
    publisher.update(phase="ready", label="v1")
    assert (read().phase, read().label) == ("ready", "v1")
    running = 0
    publisher.follow(lambda: {"running": running})
    publisher.start()
    running = 5
    wait_until(lambda: read().running == 5)
    assert read().label == "v1"
    running = 7
    publisher.stop()
    assert read().running == 7


def test_progress_is_published_in_steps_that_can_be_seen(state: LiveState) -> None:
    publisher = ReportPublisher(state.writer("version-1"), VersionReport(version=1))
    told = set()
    for step in range(10_001):
        publisher.progress(step / 10_000)
        section = state.read("version-1")
        assert section is not None
        told.add(section.data["progress"])
    assert len(told) <= 101
    assert max(told) == 1.0


def test_figures_that_fail_once_do_not_silence_it(state: LiveState) -> None:
    publisher = ReportPublisher(state.writer("version-1"), VersionReport(version=1))
    calls = 0

    def figures() -> dict[str, int]:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ZeroDivisionError
        return {"running": calls}

    publisher.follow(figures)
    publisher.start()
    wait_until(lambda: calls >= 3)
    publisher.stop()


def test_samples_are_those_of_the_contract_with_totals_and_states() -> None:
    metrics = VersionMetrics("deepseek", 2, stats(prompt_tokens=1, generated_tokens=4))
    metrics.observe(stats(prompt_tokens=5, generated_tokens=7, running=1, total_blocks=9), 2)
    metrics.observe(stats(prompt_tokens=6, generated_tokens=7, running=0, total_blocks=9), 5)
    samples = {name: (labels, value) for name, labels, value in metrics.samples()}
    assert set(samples) == {spec.name for spec in METRICS if spec.writer == "version"}
    labels = {"service": "deepseek", "version": "2"}
    assert samples["piccard_prompt_tokens_total"] == (labels, 5.0)
    assert samples["piccard_generated_tokens_total"] == (labels, 3.0)
    assert samples["piccard_direct_unsigned_claims_total"] == (labels, 5.0)
    assert samples["piccard_sequences_running"] == (labels, 0.0)
    assert samples["piccard_cache_blocks"] == (labels, 9.0)
