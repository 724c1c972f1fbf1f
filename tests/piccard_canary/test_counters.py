"""What a process counts, read out as samples."""

import pytest
from piccard_canary.counters import Counters, newest_versions, version_label
from piccard_contract.metrics import METRIC_SPECS, METRICS


def test_samples_bear_the_contracts_names() -> None:
    counters = Counters("deepseek", "router")
    counters.count("piccard_requests_total", version="1", reason="pin")
    counters.count("piccard_requests_total", version="1", reason="pin")
    counters.gauge("piccard_in_flight", version="1").inc()
    counters.histogram("piccard_first_token_seconds", version="1").observe(0.3)
    samples = {(name, labels.get("le")): value for name, labels, value in counters.samples()}

    assert samples["piccard_requests_total", None] == 2
    assert samples["piccard_in_flight", None] == 1
    assert samples["piccard_first_token_seconds_bucket", "0.25"] == 0
    assert samples["piccard_first_token_seconds_bucket", "0.5"] == 1
    assert samples["piccard_first_token_seconds_bucket", "+Inf"] == 1
    assert samples["piccard_first_token_seconds_count", None] == 1
    assert all(labels["service"] == "deepseek" for _, labels, _ in counters.samples())
    assert not [name for name, _ in samples if name.endswith("_created")]


def test_only_its_own_rows_are_counted() -> None:
    with pytest.raises(KeyError):
        Counters("deepseek", "admission").count("piccard_requests_total", version="1", reason="pin")


def test_the_table_is_sound() -> None:
    assert len(METRIC_SPECS) == len(METRICS)
    for spec in METRICS:
        assert spec.name.startswith("piccard_")
        assert spec.name.endswith("_total") or spec.kind != "counter"
        assert bool(spec.buckets) == (spec.kind == "histogram")
        assert list(spec.buckets) == sorted(spec.buckets)


def test_series_of_forgotten_versions_are_dropped() -> None:
    counters = Counters("deepseek", "router")
    blocked = counters.gauge("piccard_blocked_attempts", version="2")
    blocked.inc()
    for version in ("1", "2", "3", "none"):
        counters.count("piccard_requests_total", version=version, reason="pin")
        counters.count("piccard_errors_total", version=version, code="INTERNAL")
        counters.histogram("piccard_request_seconds", version=version).observe(0.1)
        counters.gauge("piccard_in_flight", version=version).inc()
        counters.gauge("piccard_in_flight", version=version).dec()

    counters.forget({1})
    assert {labels["version"] for _, labels, _ in counters.samples()} == {"1", "2", "none"}

    # A thread that was blocked on version 2 comes back.
    blocked.dec()
    counters.forget({1})
    assert {labels["version"] for _, labels, _ in counters.samples()} == {"1", "none"}
    assert len([name for name, labels, _ in counters.samples() if name == "piccard_request_seconds_count"]) == 2


def test_the_newest_versions_are_kept() -> None:
    samples = [("a", {"version": version_label(n)}, 1.0) for n in (3, 10, 2, None)] + [("b", {}, 1.0)]

    kept = newest_versions(samples, 2)
    assert [labels.get("version") for _, labels, _ in kept] == ["10", "none", None]
