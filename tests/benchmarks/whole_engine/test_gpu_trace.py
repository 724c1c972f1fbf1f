"""Gaps and kernel times of traces that are made up."""

from typing import Any

import pytest
import torch
from whole_engine import gpu_trace, sections
from whole_engine.gpu_trace import Event, Gap


def gpu(name: str, ts: float, dur: float, correlation: int, cat: str = "kernel") -> Event:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"correlation": correlation}}


def launch(ts: float, correlation: int, name: str = "cudaGraphLaunch") -> Event:
    return {"ph": "X", "cat": "cuda_runtime", "name": name, "ts": ts, "dur": 3, "args": {"correlation": correlation}}


def step(ts: float, dur: float) -> Event:
    return {"ph": "X", "cat": "user_annotation", "name": gpu_trace.STEP, "ts": ts, "dur": dur}


# Three steps of one graph of two kernels each, launched ahead; a copy lies within the second gap.
GRAPHS: list[Event] = [
    {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    launch(0, 1),
    launch(50, 2),
    launch(150, 3),
    gpu("a", 10, 40, 1),
    gpu("b", 50, 50, 1),
    gpu("a", 120, 40, 2),
    gpu("b", 160, 50, 2),
    gpu("Memcpy DtoH", 215, 10, 9, "gpu_memcpy"),
    gpu("a", 240, 40, 3),
    gpu("b", 280, 50, 3),
]


def test_gaps_between_graphs() -> None:
    assert gpu_trace.gaps(GRAPHS, 3) == [Gap(20, 20), Gap(30, 20)]
    told = gpu_trace.summary(gpu_trace.gaps(GRAPHS, 3))
    assert told == {
        "idle_median_us": 20,
        "idle_largest_us": 20,
        "span_median_us": 25,
        "span_largest_us": 30,
        "gaps": 2,
    }


def test_order_in_the_file_does_not_matter() -> None:
    assert gpu_trace.gaps(GRAPHS[::-1], 3) == gpu_trace.gaps(GRAPHS, 3)


def test_a_step_of_several_graphs_has_no_gap_within() -> None:
    events = [launch(0, 1), launch(5, 2), launch(50, 3), launch(55, 4)]
    events += [gpu("a", 10, 10, 1), gpu("a", 30, 10, 2), gpu("a", 60, 10, 3), gpu("a", 75, 10, 4)]
    assert gpu_trace.gaps(events, 2) == [Gap(20, 20)]


def test_eager_steps_are_told_apart_by_annotations() -> None:
    events = [step(0, 40), step(50, 40)]
    events += [launch(5, 1, "cudaLaunchKernel"), launch(35, 2, "cuLaunchKernel"), launch(55, 3, "cudaLaunchKernel")]
    # Launched between the steps: belongs to none, but keeps the device busy.
    events += [launch(45, 4, "cudaLaunchKernel")]
    events += [gpu("a", 20, 10, 1), gpu("b", 40, 10, 2), gpu("c", 55, 5, 4), gpu("a", 70, 10, 3)]
    assert gpu_trace.gaps(events, 2) == [Gap(20, 15)]


def test_kernels_that_overlap_are_counted_once() -> None:
    events = [launch(0, 1), launch(9, 2), gpu("a", 0, 10, 1), gpu("b", 5, 10, 1), gpu("a", 12, 10, 2)]
    assert gpu_trace.gaps(events, 2) == [Gap(-3, 0)]
    assert gpu_trace.busy_share(events) == 1.0


@pytest.mark.parametrize(
    ("events", "steps", "why"),
    [
        ([], 2, "no events of a GPU"),
        ([gpu("a", 0, 1, 1)], 2, "neither annotations"),
        (GRAPHS, 2, "do not divide"),
        ([launch(0, 1), gpu("a", 0, 1, 7)], 1, "kernels of 0 steps"),
    ],
)
def test_a_trace_that_cannot_be_read_says_why(events: list[Event], steps: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        gpu_trace.gaps(events, steps)


def test_kernel_times_by_name() -> None:
    times = gpu_trace.kernel_times(GRAPHS, 3)
    assert [(time.name, time.launches) for time in times] == [("b", 1.0), ("a", 1.0), ("Memcpy DtoH", 1 / 3)]
    assert [time.us for time in times] == pytest.approx([50, 40, 10 / 3])
    assert gpu_trace.busy_share(GRAPHS) == pytest.approx(280 / 320)


class FakeDevice:
    """Says that it is a GPU."""

    type = "cuda"


@pytest.mark.parametrize("steps", [3, 2])
def test_the_host_is_traced_only_where_graphs_tell_no_steps(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, list[str]]] = []

    def traced(step: Any, steps: int, device: Any, activities: list[Any]) -> list[Event]:
        asked.append((steps, [activity.name for activity in activities]))
        return GRAPHS

    monkeypatch.setattr(sections, "traced", traced)
    events = sections.decode_trace(lambda: None, steps, FakeDevice())  # type: ignore[arg-type]
    assert asked[:2] == [(2, ["CUDA"]), (steps, ["CUDA"])]
    # The three graphs of the trace are three steps, but not two.
    assert asked[2:] == ([] if steps == 3 else [(2, ["CPU", "CUDA"])])
    assert events == GRAPHS


def test_a_real_trace_has_the_annotations() -> None:
    events = sections.decode_trace(lambda: torch.ones(4).sum(), 3, torch.device("cpu"))
    assert sum(event.get("name") == gpu_trace.STEP and event["cat"] == "user_annotation" for event in events) == 3
