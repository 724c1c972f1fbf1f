"""Tells growth from noise in samples of a process that was used evenly."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

# What a series may rise by in all, by the first word of its name, for other reasons than a leak: a last thread of a
# reserve, a connection that is about to close, memory that the allocator takes in steps of up to 1 MiB, and series of
# /metrics, of which the stale ones go all at once (piccard_canary.metrics_export).
ALLOWED: Mapping[str, float] = {
    "resident": 1.5,
    "shared-memory": 1.0,
    "threads": 3.0,
    "descriptors": 3.0,
    "disk": 0.25,
    "lines": 1000.0,
}
ALLOWED_OTHERWISE = 0.5

# MiB that a process may take after its first tenth, by whatever steps.
MOST_STEPS = 16.0

# A rise within this many times the usual distance from the line is noise.
NOISES = 3.0

# MiB that each use may leave, by the beginning of a series' name; the longest that fits counts. Heaps of many threads
# fragment ever more slowly, and a leak is told from that by its size: the smallest record of a request that Python
# could keep has more than 256 bytes, the metrics of a version more than 8 KiB. The server keeps an entry with its
# configuration for each version that it ever loaded, which its index shows and which only its end frees.
PER_REQUEST: Mapping[str, float] = {"resident": 256 / 2**20}
# It also goes on to export four lines of nv_inference_request_failure of each.
PER_CYCLE: Mapping[str, float] = {
    "resident": 8 / 2**10,
    "resident MiB of tritonserver": 48 / 2**10,
    "lines of the server's own metrics": 4.0,
}


# Series that are known to rise: logs until they are put aside, and what the server itself keeps of each version.
RISING = frozenset({"disk MiB of the logs", "entries of the server's index"})


@dataclass(frozen=True, slots=True)
class Growth:
    """How one series went on after its first tenth.

    Attributes:
        start, end: of the line through it.
        noise: median distance of a sample from that line.
        allowed: rise that is no growth.
        whole: from its first samples to its last, the median of three each.
    """

    name: str
    start: float
    end: float
    noise: float
    allowed: float
    whole: float

    @property
    def rise(self) -> float:
        return self.end - self.start

    @property
    def grew(self) -> bool:
        steps = self.name.startswith("resident") and self.whole > MOST_STEPS
        return (self.rise > self.allowed or steps) and self.name not in RISING


def growth(name: str, points: Sequence[tuple[float, float]], each: Mapping[str, float]) -> Growth:
    """Look at a series of (how often it was used, value), the first tenth left out.

    The line is that of Theil and Sen, the median of the slopes between all pairs: a few odd samples do not turn it. For
    memory the slope is the median of those between neighbours: what leaks does so all the time, while heaps grow in
    steps, when more meets than ever before; all steps together may take `MOST_STEPS`.

    Args:
        each: what one use may leave, as `PER_REQUEST`.
    """
    last = max(position for position, _ in points)
    kept = [point for point in points if point[0] >= last / 10]
    pairs = [(a, b) for i, a in enumerate(kept) for b in kept[i + 1 :] if b[0] > a[0]]
    if name.startswith("resident"):
        pairs = [(a, b) for a, b in pairwise(kept) if b[0] > a[0]]
    slope = statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs) if pairs else 0.0
    level = statistics.median(value - slope * position for position, value in kept)
    noise = statistics.median(abs(value - level - slope * position) for position, value in kept)
    left = each[max(fitting, key=len)] if (fitting := [prefix for prefix in each if name.startswith(prefix)]) else 0.0
    first, final = kept[0][0], kept[-1][0]
    allowed = max(ALLOWED.get(name.split()[0], ALLOWED_OTHERWISE), NOISES * noise, left * (final - first))
    # One odd sample at either end turns nothing.
    begin, end = (statistics.median(value for _, value in part) for part in (kept[:3], kept[-3:]))
    return Growth(name, level + slope * first, level + slope * final, noise, allowed, end - begin)


def growths(samples: Sequence[tuple[int, Mapping[str, float]]], each: Mapping[str, float]) -> list[Growth]:
    """Look at every series of the samples; one that is not in all of them is looked at where it is."""
    names = dict.fromkeys(name for _, sample in samples for name in sample)
    series = {name: [(float(at), sample[name]) for at, sample in samples if name in sample] for name in names}
    return [growth(name, points, each) for name, points in series.items() if len(points) > 1]


def table(found: Sequence[Growth]) -> str:
    """A line a series, those that grew marked."""
    lines = [f"{'':44}{'after 1/10':>12}{'at the end':>12}{'rise':>10}{'noise':>10}{'allowed':>10}{'whole':>10}"]
    for item in found:
        lines.append(
            f"{item.name:44}{item.start:12.2f}{item.end:12.2f}{item.rise:10.2f}{item.noise:10.2f}{item.allowed:10.2f}{item.whole:10.2f}"
            + ("  GREW" if item.grew else "")
        )
    return "\n".join(lines)
