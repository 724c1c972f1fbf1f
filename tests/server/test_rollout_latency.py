"""Latencies in a rollout on a real server, at equal load: a slower canary fails by them, an equal one does not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from piccard.rollout.commands import abort
from piccard_canary.rollout.plan import NEVER, default_metrics
from piccard_server import RunningServer, wait_for
from quick_rollouts import begin, rollout, traffic, traffic_of, wait_phase

DELAY = 0.01
SCRIPT = {"tokens": 8, "delay_s": DELAY}
# With pauses the load wanders, so that both versions meet the same ones.
CLIENTS: dict[str, Any] = {"clients": 8, "entry": "grpc_stream", "stream": True, "pause": 0.3}
# Requests in strata that both versions met.
PAIRS = 100

# By kind of metric. Streams of few tokens on busy cores differ by themselves: only what takes half as long again is
# worse here.
CHANGES: dict[str, dict[str, float]] = {
    "latency": {"tolerated": 1.3, "least": 1.5},
    "proportion": {"margin": 0.3},
    "logprob": {},
}
OFF = {"least": 1000.0, "proved_from": NEVER}
METRICS = {
    name: rule.model_copy(update=CHANGES.get(rule.kind, OFF)).model_dump() for name, rule in default_metrics().items()
}


def gap_of(server: RunningServer) -> dict[str, Any] | None:
    """What the rollout says of the time between tokens once enough requests of equal load were seen."""
    told = rollout(server)
    assert told["phase"] == "running", told
    metric: dict[str, Any] = (told["judgement"] or {"metrics": {}})["metrics"].get("token_gap", {})
    return metric if (metric.get("pairs") or 0) >= PAIRS else None


def test_a_slower_canary_fails_and_an_equal_one_does_not(
    fresh_server: Callable[..., RunningServer], tmp_path: Path
) -> None:
    server = fresh_server()

    begin(server, tmp_path, steps=[0.5, 1.0], interval=600.0, metrics=METRICS)
    with traffic(server, SCRIPT, {}, **CLIENTS) as codes:
        metric = wait_for(lambda: gap_of(server), 180.0, "requests at equal load")
    assert metric["verdict"] != "fail", metric
    assert set(codes) == {"OK"}
    abort(server.service, "seen enough")
    wait_phase(server, "aborted")

    begin(server, tmp_path, steps=[0.5, 1.0], interval=600.0, metrics=METRICS)
    with traffic(server, SCRIPT, {"delay_s": 3 * DELAY}, **CLIENTS) as codes:
        told = wait_phase(server, "aborted", "paused", "promoted", timeout=180.0)
    assert told["phase"] == "aborted", told
    assert "token_gap: " in told["reason"]
    metric = told["judgement"]["metrics"]["token_gap"]
    assert metric["verdict"] == "fail"
    assert metric["pairs"] >= 30
    assert 2.0 < metric["difference"] < 5.0
    assert {told["judgement"]["metrics"][name]["verdict"] for name in ("errors", "truncated")}.isdisjoint({"fail"})
    assert traffic_of(server) == (None, 0.0)
    assert set(codes) == {"OK"}
