"""What a trace of torch's profiler tells of decoding steps: idle time between them, and time by kernel.

Works on the `traceEvents` of the Chrome trace that `torch.profiler` exports; times there are microseconds.
"""

import statistics
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

STEP = "engine step"
_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Gap:
    """Between the last kernel of a step and the first of the next, microseconds.

    Attributes:
        span: from end to begin.
        idle: the part of it in which nothing ran on the GPU, copies included.
    """

    span: float
    idle: float


@dataclass(frozen=True, slots=True)
class KernelTime:
    """A kernel's time and launches in one step."""

    name: str
    us: float
    launches: float


def gaps(events: list[Event], steps: int) -> list[Gap]:
    """The gaps between consecutive ones of `steps` steps.

    A step is what was launched while an annotation called STEP was open. In a trace without annotations the graphs'
    launches are taken in equal groups. Where there are graphs, their kernels alone make a step, and whatever runs
    between two of them is no idle time.

    Raises:
        ValueError: the steps cannot be told apart; says why.
    """
    gpu = _gpu_events(events)
    if not gpu:
        raise ValueError("the trace has no events of a GPU")
    owner = _owners(events, steps)
    spans: dict[int, tuple[float, float]] = {}
    for event in gpu:
        step = owner.get(event["args"].get("correlation", -1))
        if step is None or event["cat"] != "kernel":
            continue
        begin, end = _interval(event)
        known = spans.get(step, (begin, end))
        spans[step] = (min(known[0], begin), max(known[1], end))
    if len(spans) < 2:
        raise ValueError(f"kernels of {len(spans)} steps were found in the trace, at least 2 are needed")
    ordered = [spans[step] for step in sorted(spans)]
    busy = _union(_interval(event) for event in gpu)
    return [
        Gap(after[0] - before[1], max(after[0] - before[1], 0.0) - _overlap(busy, before[1], after[0]))
        for before, after in pairwise(ordered)
    ]


def kernel_times(events: list[Event], steps: int) -> list[KernelTime]:
    """Time by name of whatever ran on the GPU, the longest first, a step of `steps`."""
    total: dict[str, float] = defaultdict(float)
    launches: Counter[str] = Counter()
    for event in _gpu_events(events):
        total[event["name"]] += float(event["dur"])
        launches[event["name"]] += 1
    ordered = sorted(total, key=total.__getitem__, reverse=True)
    return [KernelTime(name, total[name] / steps, launches[name] / steps) for name in ordered]


def busy_share(events: list[Event]) -> float:
    """Share of the time from the first GPU event to the last in which anything ran; 0 without events."""
    busy = _union(_interval(event) for event in _gpu_events(events))
    if not busy:
        return 0.0
    return sum(end - begin for begin, end in busy) / (busy[-1][1] - busy[0][0])


def summary(found: list[Gap]) -> dict[str, float]:
    """Median and largest, microseconds."""
    return {
        "idle_median_us": statistics.median(gap.idle for gap in found),
        "idle_largest_us": max(gap.idle for gap in found),
        "span_median_us": statistics.median(gap.span for gap in found),
        "span_largest_us": max(gap.span for gap in found),
        "gaps": len(found),
    }


def _gpu_events(events: Iterable[Event]) -> list[Event]:
    return [event for event in events if event.get("ph") == "X" and event.get("cat") in _GPU]


def _is_graph_launch(event: Event) -> bool:
    return event.get("cat") in _LAUNCHES and str(event.get("name", "")).startswith(_GRAPH_LAUNCHES)


def _interval(event: Event) -> tuple[float, float]:
    begin = float(event["ts"])
    return begin, begin + float(event["dur"])


def _owners(events: list[Event], steps: int) -> dict[int, int]:
    """Correlation id to the step that launched it; of graphs alone where there are any."""
    launches = [event for event in events if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})]
    graphs = sorted(filter(_is_graph_launch, launches), key=lambda event: float(event["ts"]))
    marks = sorted(
        _interval(event)
        for event in events
        if event.get("cat") == "user_annotation" and event.get("name") == STEP and event.get("ph") == "X"
    )
    if marks:
        begins = [begin for begin, _ in marks]
        owners = {}
        for event in graphs or launches:
            place = bisect_right(begins, float(event["ts"])) - 1
            if place >= 0 and float(event["ts"]) < marks[place][1]:
                owners[event["args"]["correlation"]] = place
        return owners
    if not graphs:
        raise ValueError("the trace has neither annotations of steps nor launches of graphs")
    if len(graphs) % steps:
        raise ValueError(f"{len(graphs)} launches of graphs do not divide into {steps} steps")
    each = len(graphs) // steps
    return {event["args"]["correlation"]: place // each for place, event in enumerate(graphs)}


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _overlap(busy: list[tuple[float, float]], begin: float, end: float) -> float:
    return sum(max(0.0, min(stop, end) - max(start, begin)) for start, stop in busy)
