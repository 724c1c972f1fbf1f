"""What a version counts for /metrics."""

from piccard_contract.metrics import METRICS, MetricSpec
from piccard_contract.reports import Samples
from prometheus_client import CollectorRegistry, Counter, Gauge

from deepseek_engine.operator_watch import OperatorFigures, OperatorWatch
from deepseek_engine.request import EngineStats

# (metric, labels beside service and version) to its total.
Totals = dict[tuple[str, tuple[tuple[str, str], ...]], int]

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
# The same of what serves the operators, from `OperatorFigures`.
_OPERATOR_TOTALS = {
    "piccard_graph_replays_total": "replays",
    "piccard_graph_captures_total": "captures",
    "piccard_kernel_compilations_total": "compilations",
}
_FALLBACKS, _FALLBACK_SECONDS = "piccard_operator_fallbacks_total", "piccard_operator_fallback_seconds"
_UNGRAPHED, _FUSED = "piccard_ungraphed_steps_total", "piccard_operators_fused_share"
_UNSIGNED = "piccard_direct_unsigned_claims_total"


class VersionMetrics:
    """The metric families that a version writes, in a registry of its own.

    Args:
        stats: the engine's figures before its first request; its totals count from there.
        operators: what serves its operators; without it their families have no series.
    """

    def __init__(self, service: str, version: int, stats: EngineStats, operators: OperatorWatch | None = None) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"service": service, "version": str(version)}
        specs = {spec.name: spec for spec in METRICS if spec.writer == "version"}
        self._families = {
            name: _counter(spec, self._registry) for name, spec in specs.items() if spec.kind == "counter"
        }
        self._states = {
            name: Gauge(name, spec.help, spec.labels, registry=self._registry)
            for name, spec in specs.items()
            if spec.kind == "gauge"
        }
        self._operators = operators
        self._last = _totals(stats, unsigned_claims=0)
        if operators is not None:
            self._last |= _operator_totals(operators.figures(), since=True)
            self._states[_FUSED].labels(**self._labels).set(operators.fused_share)

    def observe(self, stats: EngineStats, unsigned_claims: int) -> None:
        """Bring the families up to the present figures, and to how many claims were ignored so far."""
        totals = _totals(stats, unsigned_claims)
        if self._operators is not None:
            figures = self._operators.figures()
            totals |= _operator_totals(figures)
            for operator, seconds in figures.fallback_seconds.items():
                self._states[_FALLBACK_SECONDS].labels(**self._labels, operator=operator).set(seconds)
        for (name, more), total in totals.items():
            series = self._families[name].labels(**self._labels, **dict(more))
            series.inc(max(0, total - self._last.get((name, more), 0)))
        self._last = totals
        for name, field in _GAUGES.items():
            self._states[name].labels(**self._labels).set(getattr(stats, field))

    def samples(self) -> Samples:
        """(metric, labels, value) of every family."""
        return [
            (sample.name, dict(sample.labels), sample.value)
            for family in self._registry.collect()
            for sample in family.samples
            # The library also tells when a counter was made.
            if not sample.name.endswith("_created")
        ]


def _totals(stats: EngineStats, unsigned_claims: int) -> Totals:
    totals: Totals = {(name, ()): int(getattr(stats, field)) for name, field in _TOTALS.items()}
    return totals | {(_UNSIGNED, ()): unsigned_claims}


def _operator_totals(figures: OperatorFigures, *, since: bool = False) -> Totals:
    """`since`: without the fallbacks, all of which are told, while the rest counts from the warm-up."""
    totals: Totals = {(name, ()): int(getattr(figures, field)) for name, field in _OPERATOR_TOTALS.items()}
    totals |= {(_UNGRAPHED, (("cause", cause),)): count for cause, count in figures.ungraphed.items()}
    if since:
        return totals
    return totals | {
        (_FALLBACKS, (("cause", cause), ("operator", operator))): count
        for (operator, cause), count in figures.fallbacks.items()
    }


def _counter(spec: MetricSpec, registry: CollectorRegistry) -> Counter:
    return Counter(spec.name, spec.help, spec.labels, registry=registry)
