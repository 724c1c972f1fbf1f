"""What a version counts for /metrics."""

from piccard_contract.metrics import METRICS, MetricSpec
from piccard_contract.reports import Samples
from prometheus_client import CollectorRegistry, Counter, Gauge

from deepseek_engine.request import EngineStats

# Counters from the engine's totals, and gauges from its state.
_TOTALS = {
    "piccard_prompt_tokens_total": "prompt_tokens",
    "piccard_generated_tokens_total": "generated_tokens",
    "piccard_cached_tokens_total": "prefix_hit_tokens",
    "piccard_preemptions_total": "preemptions",
    "piccard_engine_refusals_total": "refused",
}
_GAUGES = {
    "piccard_sequences_running": "running",
    "piccard_sequences_waiting": "waiting",
    "piccard_cache_blocks_free": "free_blocks",
    "piccard_cache_blocks": "total_blocks",
    "piccard_cache_pressure": "pressure",
}
_UNSIGNED = "piccard_direct_unsigned_claims_total"


class VersionMetrics:
    """The metric families that a version writes, in a registry of its own.

    Args:
        stats: the engine's figures before its first request; its totals count from there.
    """

    def __init__(self, service: str, version: int, stats: EngineStats) -> None:
        self._registry = CollectorRegistry()
        labels = {"service": service, "version": str(version)}
        specs = {spec.name: spec for spec in METRICS if spec.writer == "version"}
        self._counters = {
            name: _counter(specs[name], self._registry).labels(**labels) for name in (*_TOTALS, _UNSIGNED)
        }
        self._gauges = {
            name: Gauge(name, specs[name].help, specs[name].labels, registry=self._registry).labels(**labels)
            for name in _GAUGES
        }
        self._last = _totals(stats, unsigned_claims=0)

    def observe(self, stats: EngineStats, unsigned_claims: int) -> None:
        """Bring the families up to the engine's present figures, and to how many claims were ignored so far."""
        totals = _totals(stats, unsigned_claims)
        for name, total in totals.items():
            self._counters[name].inc(max(0, total - self._last[name]))
        self._last = totals
        for name, field in _GAUGES.items():
            self._gauges[name].set(getattr(stats, field))

    def samples(self) -> Samples:
        """(metric, labels, value) of every family."""
        return [
            (sample.name, dict(sample.labels), sample.value)
            for family in self._registry.collect()
            for sample in family.samples
            # The library also tells when a counter was made.
            if not sample.name.endswith("_created")
        ]


def _totals(stats: EngineStats, unsigned_claims: int) -> dict[str, int]:
    return {name: int(getattr(stats, field)) for name, field in _TOTALS.items()} | {_UNSIGNED: unsigned_claims}


def _counter(spec: MetricSpec, registry: CollectorRegistry) -> Counter:
    return Counter(spec.name, spec.help, spec.labels, registry=registry)
