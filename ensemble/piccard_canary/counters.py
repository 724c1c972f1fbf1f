"""What a process of the ensemble counts: the contract's metrics in a registry of its own, read out as samples."""

from collections.abc import Collection, Iterable
from typing import Literal

from piccard_contract.metrics import METRIC_SPECS, METRICS, MetricSpec
from piccard_contract.reports import Samples
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

# The label version of a request that no version was found for.
NO_VERSION = "none"


class Counters:
    """The metrics of one kind of process.

    Args:
        service: value of the label service.
        writer: whose rows of the contract's table are counted here.
    """

    def __init__(self, service: str, writer: Literal["router", "admission"]) -> None:
        self._service = service
        self._registry = CollectorRegistry()
        self._metrics = {spec.name: _metric(spec, self._registry) for spec in METRICS if spec.writer == writer}

    def count(self, name: str, **labels: str) -> None:
        """Add one to a counter."""
        metric = self._metrics[name]
        assert isinstance(metric, Counter)
        metric.labels(service=self._service, **labels).inc()

    def histogram(self, name: str, **labels: str) -> Histogram:
        """A histogram with its labels set, to be kept where it is observed often."""
        metric = self._metrics[name]
        assert isinstance(metric, Histogram)
        return metric.labels(service=self._service, **labels)

    def gauge(self, name: str, **labels: str) -> Gauge:
        """A gauge with its labels set."""
        metric = self._metrics[name]
        assert isinstance(metric, Gauge)
        return metric.labels(service=self._service, **labels)

    def forget(self, known: Collection[int]) -> None:
        """Drop the series of versions that are not `known` any more, but for those with something in flight."""
        kept = self._in_flight() | set(known)
        for name, metric in self._metrics.items():
            names = METRIC_SPECS[name].labels
            if "version" not in names:
                continue
            for labels in _series(metric):
                version = labels["version"]
                if version.isdigit() and int(version) not in kept:
                    metric.remove(*(labels[label] for label in names))

    def _in_flight(self) -> set[int]:
        """Versions of which a gauge is not zero: who raised it will lower it."""
        return {
            _version(labels)
            for name, labels, value in self.samples()
            if value and name in METRIC_SPECS and METRIC_SPECS[name].kind == "gauge"
        }

    def samples(self) -> Samples:
        """All values as (name, labels, value); a histogram is its buckets, sum and count."""
        return [
            (sample.name, dict(sample.labels), float(sample.value))
            for family in self._registry.collect()
            for sample in family.samples
            # When a series was made says nothing about the service.
            if not sample.name.endswith("_created")
        ]


def version_label(version: int | None) -> str:
    """The label of a version."""
    return NO_VERSION if version is None else str(version)


def newest_versions(samples: Samples, keep: int) -> Samples:
    """The samples without those of all but the `keep` newest versions: a section of the state file has an end.

    A series that is left out keeps the value it was exported with.
    """
    kept = set(sorted({_version(labels) for _, labels, _ in samples}, reverse=True)[:keep])
    return [sample for sample in samples if _version(sample[1]) in kept]


def _version(labels: dict[str, str]) -> int:
    number = labels.get("version", "")
    # What has no version is never left out.
    return int(number) if number.isdigit() else 10**18


def _series(metric: Counter | Gauge | Histogram) -> list[dict[str, str]]:
    """The labels of each series of a metric."""
    found = {
        frozenset((key, value) for key, value in sample.labels.items() if key != "le")
        for family in metric.collect()
        for sample in family.samples
    }
    return [dict(labels) for labels in found]


def _metric(spec: MetricSpec, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    labels: Iterable[str] = spec.labels
    if spec.kind == "histogram":
        return Histogram(spec.name, spec.help, labels, buckets=spec.buckets, registry=registry)
    if spec.kind == "gauge":
        return Gauge(spec.name, spec.help, labels, registry=registry)
    return Counter(spec.name, spec.help, labels, registry=registry)
