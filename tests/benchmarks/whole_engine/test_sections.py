"""Every section once, on a tiny model; and the arithmetic in them."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_engine.settings import EngineSettings
from hypothesis import given
from hypothesis import strategies as st
from whole_engine import checkpoint, sections, worker
from whole_engine.engine import Built, Streams, decode, watched_experts
from whole_engine.floor import Routing
from whole_engine.results import Log, Row, read, rows_of
from whole_engine.sections import percentile, token_gaps
from whole_engine.watching import Captures, Compilations
from whole_engine.worker import WORKERS, Work

MakeWork = Callable[..., Work]

# Two launches of graphs, a kernel each.
TRACE: list[dict[str, Any]] = [
    {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": 10, "args": {"correlation": correlation}}
    for cat, name, ts, correlation in (
        ("cuda_runtime", "cudaGraphLaunch", 0, 1),
        ("cuda_runtime", "cudaGraphLaunch", 20, 2),
        ("cuda_runtime", "cudaGraphLaunch", 40, 3),
        ("kernel", "moe", 5, 1),
        ("kernel", "moe", 25, 2),
        ("kernel", "moe", 55, 3),
    )
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights") / "tiny"
    checkpoint.ensure(folder, checkpoint.tiny(), seed=0, device=torch.device("cpu"))
    return folder


@pytest.fixture
def work(folder: Path, tmp_path: Path) -> MakeWork:
    def make(names: list[str], deadline: float | None = None) -> Work:
        now = time.time()
        return Work(
            sections=names,
            folder=folder,
            log=Log(tmp_path / "run.jsonl"),
            device=torch.device("cpu"),
            memory=None,
            shape="tiny",
            layers=None,
            seed=0,
            smoke=True,
            started=(now, now),
            deadline=deadline,
        )

    return make


def found(work: Work) -> dict[tuple[str, str], Row]:
    return {(row.section, row.case): row for row in rows_of(read([work.log.path]))}


def test_two_runners_take_turns(work: MakeWork, library: Path, tmp_path: Path) -> None:
    done = replace(work(["onnxruntime"]), export=tmp_path / "export", ops_library=library)
    WORKERS["runners"](done)
    lines = read([done.log.path])
    assert not [line for line in lines if "failed" in line or "skipped" in line]
    rows = found(done)
    decoding = [f"decode, batch {batch}, over runner torch" for batch in (1, 4)]
    prompts = [f"first token, {length}-token prompt, over runner torch" for length in (20, 70)]
    assert [*rows] == [("onnxruntime", case) for case in (*decoding, *prompts)]
    for (_, case), row in rows.items():
        assert row.ms is not None
        assert row.value == pytest.approx(row.ms / row.details["torch_ms"])
        kept = row.details["steps_ms" if case in decoding else "times_ms"]
        assert {name: len(times) for name, times in kept.items()} == {"torch": 2, "onnxruntime": 2}
    assert [row.target for row in rows.values()] == [1.2, 1.1, None, None]
    # What is exported is used again.
    made = (tmp_path / "export" / "model.onnx").stat().st_mtime_ns
    WORKERS["runners"](done)
    assert (tmp_path / "export" / "model.onnx").stat().st_mtime_ns == made


def test_two_runners_are_not_begun_once_the_time_is_used_up(work: MakeWork, library: Path, tmp_path: Path) -> None:
    late = work(["onnxruntime"], deadline=time.time() - 1)
    done = replace(late, export=tmp_path / "export", ops_library=library)
    WORKERS["runners"](done)
    assert not found(done)
    assert [line["skipped"] for line in read([done.log.path]) if "skipped" in line] == [
        *(f"onnxruntime, batch {batch}" for batch in (1, 4)),
        *(f"onnxruntime, prompt of {length}" for length in (20, 70)),
    ]


def test_the_sections_of_bulk_serving(work: MakeWork, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "decode_trace", lambda step, steps, device: [step() for _ in range(2)] and TRACE)
    done = work(["decode", "generate", "prefill", "first", "trace", "filtered", "long"])
    WORKERS["bulk"](done)
    assert not [line for line in read([done.log.path]) if "failed" in line or "skipped" in line]
    rows = found(done)
    assert {name for name, _ in rows} == {*done.sections, "routing", "warm"}
    one = rows["decode", "batch 1, 16-token prompts"]
    assert one.details["touched_a_layer"] == 3.0
    assert one.details["context"] == 16 + 4
    assert one.floor_ms == pytest.approx(sum(one.details["floor_bytes"].values()) / floor_rate(done) * 1e3)
    assert one.ms == pytest.approx(one.value * (one.floor_ms or 0.0))
    assert len(one.details["steps_ms"]) == done.sizes.turns
    assert len(rows["long", "batch 2, 80-token prompts"].details["steps_ms"]) == done.sizes.turns
    assert rows["routing", "batch 4"].details["histogram"].keys() == {"1", "2"}
    idle = rows["trace", "batch 1, idle between steps, median"]
    assert (idle.value, idle.target, idle.details["idle_largest_us"]) == (15.0, 30.0, 20.0)
    kernels = rows["trace", "batch 1, GPU time a step"]
    assert (kernels.value, kernels.details["launches"]) == (10.0, 1.0)
    assert kernels.details["kernels"] == [["moe", 10.0, 1.0]]
    assert all(row.details["preemptions"] == 0 for (name, _), row in rows.items() if name == "warm")


def floor_rate(work: Work) -> float:
    headers = [line["header"] for line in read([work.log.path]) if "header" in line]
    return float(next(header["floor_bytes_per_second"] for header in headers if "card" in header))


def test_interactive_serving_tells_its_start(work: MakeWork) -> None:
    done = work(["start", "streams"])
    WORKERS["interactive"](done)
    rows = found(done)
    start = rows["start", "start to first token"]
    parts = {"interpreter", "imports", "device", "weights", "runner", "first token"}
    assert parts <= start.details.keys()
    assert 0 < sum(start.details[name] for name in parts - {"first token"}) <= start.value
    (streams,) = (row for (name, _), row in rows.items() if name == "streams")
    assert streams.target == pytest.approx(2 * streams.details["quiet_median_ms"] + streams.details["chunk_ms"])
    assert streams.details["longest_gap_ms"] >= streams.value >= streams.details["median_gap_ms"]
    assert len(streams.details["prompt_seconds"]) == 2


def test_transformers_on_the_same_folder(work: MakeWork) -> None:
    done = work(["transformers"])
    WORKERS["transformers"](done)
    assert {case for _, case in found(done)} == {"batch 1, grouped_mm", "batch 32, grouped_mm"}


def test_nothing_is_begun_after_the_deadline(work: MakeWork) -> None:
    done = work(["decode", "first"], deadline=time.time() - 1)
    WORKERS["bulk"](done)
    assert [line["skipped"] for line in read([done.log.path]) if "skipped" in line] == ["decode", "first"]
    assert not found(done)


def test_a_section_that_fails_keeps_no_other_from_running(work: MakeWork, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(bench: sections.Bench) -> None:
        with Streams(bench.built.engine) as streams:
            streams.add(bench.prompts.draw(2, 8), 50)
            streams.until(3)
            raise ValueError("broken on purpose")

    monkeypatch.setitem(sections.SECTIONS, "decode", fail)
    done = work(["decode", "first"])
    WORKERS["bulk"](done)
    assert [line["why"] for line in read([done.log.path]) if "failed" in line] == ["ValueError: broken on purpose"]
    assert ("first", "16-token prompt") in found(done)


def test_what_breaks_the_device_ends_the_process(work: MakeWork, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(bench: sections.Bench) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setitem(sections.SECTIONS, "decode", fail)
    with pytest.raises(RuntimeError, match="illegal"):
        WORKERS["bulk"](work(["decode", "first"]))


class Clocked:
    """An engine whose prompts start one step after another and whose clock moves 1 s a decoding step."""

    def __init__(self, clock: list[float]) -> None:
        self._clock = clock
        self._left: dict[str, int] = {}
        self._started: list[str] = []
        self.aborted: list[str] = []

    def add(self, request: Any) -> None:
        self._left[request.id] = request.params.max_tokens

    def abort(self, name: str) -> None:
        self.aborted.append(name)
        del self._left[name]

    def has_work(self) -> bool:
        return bool(self._left)

    def step(self) -> list[Any]:
        from deepseek_engine.request import EngineOutput

        waiting = [name for name in self._left if name not in self._started]
        self._started += waiting[:1]
        self._clock[0] += 100.0 if waiting else 1.0
        outputs = []
        for name in [name for name in self._left if name in self._started]:
            self._left[name] -= 1
            last = "length" if self._left[name] == 0 else None
            outputs.append(EngineOutput(name, 0, [7], "", 1, 1, 0, finish_reason=last))  # type: ignore[arg-type]
            if last:
                del self._left[name]
        return outputs


def test_a_decoding_step_is_told_without_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    engine = Clocked(clock)
    seen: list[int] = []
    result = decode(
        engine,  # type: ignore[arg-type]
        [[1, 2, 3]] * 4,
        lead=2,
        window=5,
        windows=3,
        then=lambda streams: seen.append(min(map(len, streams.times.values()))),
    )
    assert result.steps == [1.0, 1.0, 1.0]
    assert result.context == 3 + (2 + 17) / 2
    # All four were there until the end.
    assert seen == [17]
    assert len(engine.aborted) == 4


@given(values=st.lists(st.floats(0, 10), min_size=1, max_size=300), share=st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_percentile(values: list[float], share: float) -> None:
    value = percentile(values, share)
    assert value in values
    assert sum(each <= value for each in values) >= share * len(values)
    assert sum(each < value for each in values) < share * len(values)


def test_gaps_of_a_time() -> None:
    streams = Streams(None)  # type: ignore[arg-type]
    streams.times = {"a": [1.0, 2.0, 4.0, 8.0], "b": [3.0, 5.0], "c": [4.5]}
    assert token_gaps(streams, ["a", "b", "c"], 2.0, 5.0) == [2.0, 2.0]
    with pytest.raises(RuntimeError, match="no stream"):
        token_gaps(streams, ["c"], 0.0, 9.0)


class Graph:
    """Stands in for torch's."""

    def capture_begin(self, pool: object = None) -> None:
        del pool

    def capture_end(self) -> None:
        time.sleep(0.002)


class Observed:
    """A model of the device kernels and its runner, which tell their experts in eager steps alone."""

    eager = False
    observer: Callable[[int, torch.Tensor], None] | None = None

    def observe_experts(self, observer: Callable[[int, torch.Tensor], None] | None) -> None:
        self.observer = observer

    def step(self) -> None:
        if self.eager and self.observer is not None:
            self.observer(1, torch.tensor([[0, 1, 4], [-1, -1, -1]]))


def test_a_model_with_an_observer_is_asked_and_left_as_it_was() -> None:
    model, routing = Observed(), Routing(4)
    built = Built(None, model, model, EngineSettings())  # type: ignore[arg-type]
    model.step()
    with watched_experts(built, routing):
        model.step()
    model.step()
    assert (model.eager, model.observer) == (False, None)
    assert routing.report(2, 1)["histogram"] == {1: [1, 1, 0, 0]}


def test_captures_are_counted_and_timed() -> None:
    captures = Captures()
    captures.watch(Graph)
    for _ in range(3):
        graph = Graph()
        graph.capture_begin(pool=None)
        graph.capture_end()
    assert captures.count == 3
    assert captures.seconds >= 0.006


def test_compilations_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    heard: list[bool] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **event: heard.append(event["cache_hit"]))
    compilations = Compilations()
    assert compilations.watch()
    times = triton.knobs.CompileTimes(1_000_000, [("ttir", 500_000)], 0)
    for hit in (False, True):
        triton.knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=times, cache_hit=hit)
    assert (compilations.count, compilations.hits, compilations.seconds) == (2, 1, 3.0)
    # Whoever listened before still does.
    assert heard == [False, True]


def test_a_copy_is_counted_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(1000))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(times)))
    assert sections.copy_rate(torch.device("cpu"), 1 << 20) == 2 << 20
    assert sections.floor_rate(4.3e12, "NVIDIA H200") == 4.3e12
    assert sections.floor_rate(3.9e12, "NVIDIA H200") == 4.2e12
    assert sections.floor_rate(1.4e12, "NVIDIA A100") == 1.4e12


def test_weights_are_made_by_a_process_of_their_own(work: MakeWork, tmp_path: Path) -> None:
    from dataclasses import replace

    done = replace(work([]), folder=tmp_path / "made", layers=2)
    worker.make_weights(done)
    assert json.loads((done.folder / "config.json").read_text()) == checkpoint.tiny(2)
    assert checkpoint.is_whole(done.folder, checkpoint.tiny(2), 0)
