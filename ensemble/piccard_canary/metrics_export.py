"""Adds up what all processes of a service counted, and moves the server's metrics along.

What a process counted stays counted when it ends: its last samples remain, and its successor's are added to them. A
gauge is the sum of what living processes say.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from piccard_contract.live_state import Section
from piccard_contract.metrics import METRIC_SPECS

Kind = Literal["counter", "gauge"]
SeriesKey = tuple[str, tuple[tuple[str, str], ...]]

_HISTOGRAM_PARTS = ("_bucket", "_sum", "_count")


class Series(Protocol):
    """One metric of the server with its labels. Every call is a message to another process."""

    def value(self) -> float: ...

    def increment(self, by: float) -> None: ...

    def set(self, value: float) -> None: ...


class Families(Protocol):
    """Makes the server's metrics."""

    def series(self, name: str, kind: Kind, help: str, labels: dict[str, str]) -> Series: ...


@dataclass(slots=True)
class _Owner:
    pid: int
    values: dict[SeriesKey, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Counter:
    series: Series
    exported: float
    # What the server's counter held before that no section explains: an earlier exporter's ended processes.
    offset: float


class MetricsExport:
    """Brings the server's metrics up to date with the sections of the state file."""

    def __init__(self, families: Families) -> None:
        self._families = families
        self._owners: dict[str, _Owner] = {}
        self._past: dict[SeriesKey, float] = {}
        self._counters: dict[SeriesKey, _Counter] = {}
        self._gauges: dict[SeriesKey, tuple[Series, float]] = {}

    def export(self, sections: Iterable[Section]) -> None:
        """Take what the sections say now."""
        gauges: dict[SeriesKey, float] = dict.fromkeys(self._gauges, 0.0)
        for section in sections:
            owner = self._owner(section)
            for name, labels, value in section.data.get("samples", ()):
                key = name, tuple(sorted(labels.items()))
                kind = _kind(name)
                if kind == "counter":
                    owner.values[key] = float(value)
                elif kind == "gauge" and section.alive:
                    gauges[key] = gauges.get(key, 0.0) + float(value)
        for key, total in self._totals().items():
            self._move_counter(key, total)
        for key, value in gauges.items():
            self._move_gauge(key, value)

    def _owner(self, section: Section) -> _Owner:
        owner = self._owners.get(section.owner)
        if owner is not None and owner.pid == section.pid:
            return owner
        if owner is not None:
            for key, value in owner.values.items():
                self._past[key] = self._past.get(key, 0.0) + value
        fresh = _Owner(section.pid)
        self._owners[section.owner] = fresh
        return fresh

    def _totals(self) -> dict[SeriesKey, float]:
        totals = dict(self._past)
        for owner in self._owners.values():
            for key, value in owner.values.items():
                totals[key] = totals.get(key, 0.0) + value
        return totals

    def _move_counter(self, key: SeriesKey, total: float) -> None:
        counter = self._counters.get(key)
        if counter is None:
            series = self._series(key, "counter")
            held = series.value()
            counter = self._counters[key] = _Counter(series, held, max(0.0, held - total))
        step = total + counter.offset - counter.exported
        if step > 0:
            counter.series.increment(step)
            counter.exported += step

    def _move_gauge(self, key: SeriesKey, value: float) -> None:
        known = self._gauges.get(key)
        if known is None:
            known = self._series(key, "gauge"), float("nan")
        series, exported = known
        if value != exported:
            series.set(value)
        self._gauges[key] = series, value

    def _series(self, key: SeriesKey, kind: Kind) -> Series:
        name, labels = key
        return self._families.series(name, kind, METRIC_SPECS[_family(name)].help, dict(labels))


def _family(name: str) -> str:
    """The contract's name of a sample's metric: a histogram's parts have suffixes."""
    for part in _HISTOGRAM_PARTS:
        base = name.removesuffix(part)
        if base != name and base in METRIC_SPECS and METRIC_SPECS[base].kind == "histogram":
            return base
    return name


def _kind(name: str) -> Kind | None:
    """How a sample is exported; None where a newer process counts what this one does not know."""
    spec = METRIC_SPECS.get(_family(name))
    if spec is None:
        return None
    return "gauge" if spec.kind == "gauge" else "counter"
