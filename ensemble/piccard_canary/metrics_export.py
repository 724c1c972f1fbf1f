"""Adds up what all processes of a service counted, and moves the server's metrics along.

What a process counted stays counted when it ends: its last samples remain, and its successor's are added to them. A
gauge is the sum of what living processes say. The series of a version end when state.json no longer names it.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from piccard_contract.live_state import Section
from piccard_contract.metrics import METRIC_SPECS

Kind = Literal["counter", "gauge"]
SeriesKey = tuple[str, tuple[tuple[str, str], ...]]

# The server keeps a series for as long as its family, so families are made anew when this many of their series are of
# versions that there are no more, and as many as the others.
STALE = 256

_HISTOGRAM_PARTS = ("_bucket", "_sum", "_count")


class Series(Protocol):
    """One metric of the server with its labels. Every call is a message to another process."""

    def value(self) -> float: ...

    def increment(self, by: float) -> None: ...

    def set(self, value: float) -> None: ...


class Families(Protocol):
    """Makes the server's metrics."""

    def series(self, name: str, kind: Kind, help: str, labels: dict[str, str]) -> Series: ...

    def clear(self) -> None:
        """Take all series from the server; those that were made cannot be used any more."""
        ...


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
        self._stale = 0

    def export(self, sections: Iterable[Section], known: Collection[int] | None = None) -> None:
        """Take what the sections say now.

        Args:
            known: the versions that there are; series of others are dropped. None drops none.
        """
        if known is not None:
            self._forget(known)
        gauges: dict[SeriesKey, float] = dict.fromkeys(self._gauges, 0.0)
        for section in sections:
            owner = self._owner(section)
            for name, labels, value in section.data.get("samples", ()):
                key = name, tuple(sorted(labels.items()))
                # Routers forget a version a moment later than we.
                kind = None if _forgotten(key, known) else _kind(name)
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

    def _forget(self, known: Collection[int]) -> None:
        held: list[dict[SeriesKey, Any]] = [self._past, self._counters, self._gauges]
        held += [owner.values for owner in self._owners.values()]
        for series in held:
            for key in [key for key in series if _forgotten(key, known)]:
                del series[key]
                self._stale += series is self._counters or series is self._gauges
        self._owners = {name: owner for name, owner in self._owners.items() if owner.values}
        if self._stale >= max(STALE, len(self._counters) + len(self._gauges)):
            self._renew()

    def _renew(self) -> None:
        """Make the families anew without what is stale; a series is missing for some milliseconds, and never falls."""
        self._stale = 0
        self._gauges.clear()
        offsets = {key: counter.offset for key, counter in self._counters.items()}
        self._counters.clear()
        self._families.clear()
        totals = self._totals()
        for key, offset in offsets.items():
            self._counters[key] = _Counter(self._series(key, "counter"), 0.0, offset)
            self._move_counter(key, totals.get(key, 0.0))

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


def _forgotten(key: SeriesKey, known: Collection[int] | None) -> bool:
    """Whether a series is of a version that there is no more."""
    version = dict(key[1]).get("version", "")
    return known is not None and version.isdigit() and int(version) not in known


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
