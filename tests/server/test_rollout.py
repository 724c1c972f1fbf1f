"""Rollouts on a real server: a canary that errs is taken back, a good one is promoted though controllers are killed."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from entry_points import ENTRY_POINTS
from piccard.rollout.commands import status
from piccard_canary.rollout.plan import NEVER, default_metrics
from piccard_server import RunningServer, wait_for

TOKENS = 3
CLIENTS = 4

# Machines that run tests are slow for their own reasons: latencies fail nobody here.
_CHANGES: dict[str, dict[str, float]] = {"proportion": {"margin": 0.3}, "logprob": {}}
_RULES = {
    name: rule.model_copy(update=_CHANGES.get(rule.kind, {"least": 1000.0, "proved_from": NEVER})).model_dump()
    for name, rule in default_metrics().items()
}

PLAN = {
    "steps": [0.4, 0.6, 1.0],
    "interval": 1.0,
    "look": 0.5,
    "min_samples": 20,
    "hysteresis": 1,
    "hold": 1000,
    "bake": 1.0,
    "metrics": _RULES,
}


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(PLAN))
    return path


@contextmanager
def traffic(server: RunningServer, canary: dict[str, Any]) -> Iterator[list[str]]:
    """Clients that send one request after the other, of which version 2 makes what `canary` says; their codes."""
    over = threading.Event()
    codes: list[str] = []
    script = {"tokens": TOKENS, "versions": {"2": canary}}
    inputs = {"text_input": "a b c", "extensions": {"script": script}}

    def send() -> None:
        while not over.is_set():
            codes.append(ENTRY_POINTS["generate"](server, {}, {}, inputs).code)

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(send) for _ in range(CLIENTS)]
        try:
            yield codes
        finally:
            over.set()
        for client in clients:
            client.result(60)


def rollout(server: RunningServer) -> dict[str, Any]:
    return status(server.service)


def wait_phase(server: RunningServer, *phases: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        told = rollout(server)
        return told if told["phase"] in phases else None

    return wait_for(look, 60, f"the rollout to be {' or '.join(phases)}; it is {rollout(server)}")


def policy(server: RunningServer) -> tuple[int | None, float]:
    found = yaml.safe_load(server.service.policy_file.read_text())
    return found["canary"], found["traffic_ratio"]


def test_a_rollout_outlives_its_controllers(fresh_server: Callable[..., RunningServer], plan: Path) -> None:
    server = fresh_server()
    start = ("rollout", "start", "--version=2", f"--plan={plan}")

    # Every answer of the canary fails; stable takes each over, so that no client sees it.
    server.piccard(*start)
    with traffic(server, {"fail_at": 0, "error": "INTERNAL"}) as codes:
        aborted = wait_phase(server, "aborted", "promoted", "paused")
    assert aborted["phase"] == "aborted"
    assert aborted["ratio"] == 0.4
    assert "errors: 100.00 % against 0.00 %" in aborted["reason"]
    # Errors may be sure a look earlier than this.
    assert aborted["judgement"]["metrics"]["fallback"]["verdict"] != "pass"
    assert policy(server) == (None, 0.0)
    assert set(codes) == {"OK"}
    assert server.state().stable == 1

    # The next one is good. The controller of `piccard serve` is killed, and another one goes on alone.
    server.piccard(*start)
    with traffic(server, {}) as codes:
        wait_for(lambda: policy(server) == (2, 0.4), 60, "the first step")
        server.kill_supervisor()
        alone = subprocess.Popen([sys.executable, "-m", "piccard", "rollout", "run", f"--home={server.home}"])
        try:
            wait_for(lambda: policy(server)[1] >= 0.6 or server.state().stable == 2, 60, "the second step")
        finally:
            alone.kill()
            alone.wait()
        server.serve_again()
        promoted = wait_phase(server, "promoted", "aborted", "rolled_back", "paused")
    assert promoted["phase"] == "promoted", promoted
    # The same words have the same log-probability in every scripted version.
    line = next(text for text in server.service.audit_log.read_text().splitlines()[::-1] if '"promoting"' in text)
    assert json.loads(line)["to"]["metrics"]["golden_logprob"]["verdict"] == "pass"
    assert server.state().stable == 2
    assert server.state().previous == 1
    assert policy(server) == (None, 0.0)
    assert set(codes) == {"OK"}
    server.wait_ready()
    assert server.problems() == []
