from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from deepseek_engine.operator_watch import OperatorFigures
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


class Operators:
    """A watch of figures that a test sets."""

    fused_share = 0.75

    def __init__(self) -> None:
        self.now = OperatorFigures()

    def figures(self) -> OperatorFigures:
        return self.now


def test_samples_are_those_of_the_contract_with_totals_and_states() -> None:
    operators = Operators()
    # What the warm-up has captured and compiled counts for nothing; its fallbacks do.
    warm = OperatorFigures(
        {("rms_norm", "model"): 3}, {"rms_norm": 0.002}, captures=40, compilations=50, ungraphed={"longer": 2}
    )
    operators.now = warm
    metrics = VersionMetrics("deepseek", 2, stats(prompt_tokens=1, generated_tokens=4), operators)  # type: ignore[arg-type]
    metrics.observe(stats(prompt_tokens=5, generated_tokens=7, running=1, total_blocks=9), 2)
    operators.now = replace(
        warm, fallbacks={("rms_norm", "model"): 7}, replays=9, compilations=51, ungraphed={"longer": 5, "other": 1}
    )
    metrics.observe(stats(prompt_tokens=6, generated_tokens=7, running=0, total_blocks=9), 5)
    samples = {(name, labels.get("cause", "")): (labels, value) for name, labels, value in metrics.samples()}
    assert {name for name, _ in samples} == {spec.name for spec in METRICS if spec.writer == "version"}
    labels = {"service": "deepseek", "version": "2"}
    for name, value in {
        "piccard_prompt_tokens_total": 5.0,
        "piccard_generated_tokens_total": 3.0,
        "piccard_direct_unsigned_claims_total": 5.0,
        "piccard_sequences_running": 0.0,
        "piccard_cache_blocks": 9.0,
        "piccard_graph_replays_total": 9.0,
        "piccard_graph_captures_total": 0.0,
        "piccard_kernel_compilations_total": 1.0,
        "piccard_operators_fused_share": 0.75,
    }.items():
        assert samples[name, ""] == (labels, value), name
    assert samples["piccard_operator_fallback_seconds", ""] == ({**labels, "operator": "rms_norm"}, 0.002)
    fallback = {**labels, "operator": "rms_norm", "cause": "model"}
    assert samples["piccard_operator_fallbacks_total", "model"] == (fallback, 7.0)
    assert [samples["piccard_ungraphed_steps_total", cause][1] for cause in ("longer", "other")] == [3.0, 1.0]


def test_a_version_without_operators_has_no_series_of_theirs() -> None:
    metrics = VersionMetrics("deepseek", 2, stats())
    metrics.observe(stats(), 0)
    assert not [name for name, _, _ in metrics.samples() if "operator" in name or "graph" in name or "kernel" in name]
