"""Rollouts on a real server: a canary that errs is taken back, a good one is promoted though controllers are killed."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from piccard_server import RunningServer, wait_for
from quick_rollouts import begin, traffic, traffic_of, wait_phase

SCRIPT = {"tokens": 3}


def test_a_rollout_outlives_its_controllers(fresh_server: Callable[..., RunningServer], tmp_path: Path) -> None:
    # A breaker that the first rollout opened would keep the second one's first requests from the canary.
    server = fresh_server(breaker={"consecutive_errors": None, "error_share": None})

    # Every answer of the canary fails; stable takes each over, so that no client sees it.
    begin(server, tmp_path)
    with traffic(server, SCRIPT, {"fail_at": 0, "error": "INTERNAL"}) as codes:
        aborted = wait_phase(server, "aborted", "promoted", "paused")
    assert aborted["phase"] == "aborted"
    assert aborted["ratio"] == 0.4
    assert "errors: 100.00 % against 0.00 %" in aborted["reason"]
    # Errors may be sure a look earlier than this.
    assert aborted["judgement"]["metrics"]["fallback"]["verdict"] != "pass"
    assert traffic_of(server) == (None, 0.0)
    assert set(codes) == {"OK"}
    assert server.state().stable == 1

    # The next one is good. The controller of `piccard serve` is killed, and another one goes on alone.
    begin(server, tmp_path)
    with traffic(server, SCRIPT, {}) as codes:
        wait_for(lambda: traffic_of(server) == (2, 0.4), 60, "the first step")
        server.kill_supervisor()
        alone = subprocess.Popen([sys.executable, "-m", "piccard", "rollout", "run", f"--home={server.home}"])
        try:
            wait_for(lambda: traffic_of(server)[1] >= 0.6 or server.state().stable == 2, 60, "the second step")
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
    assert traffic_of(server) == (None, 0.0)
    assert set(codes) == {"OK"}
    server.wait_ready()
    assert server.problems() == []
