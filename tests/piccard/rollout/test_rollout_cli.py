"""`piccard rollout` over a home without a server."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from piccard.policy_store import load_policy
from piccard_contract.home import Service

Piccard = Callable[..., "subprocess.CompletedProcess[str]"]


def test_a_life(service: Service, piccard: Piccard) -> None:
    home = service.home
    assert "there was no rollout yet" in piccard(home, "rollout", "status").stdout
    begun = piccard(home, "rollout", "start", "--version=2", "--steps=0.05,1", "--interval=60").stdout
    assert "begins at 5 %; nobody runs it yet: `piccard serve` does" in begun
    assert "paused by a person" not in piccard(home, "rollout", "status").stdout
    piccard(home, "rollout", "pause")
    assert "version 2 beside 1: paused, step 5 %: paused by a person" in piccard(home, "rollout", "status").stdout
    told = json.loads(piccard(home, "rollout", "status", "--json").stdout)
    assert (told["phase"], told["ratio"], told["controller"]) == ("paused", 0.05, None)
    piccard(home, "rollout", "resume")
    assert json.loads(piccard(home, "rollout", "abort", "--reason=no", "--json").stdout)["changed"]
    assert load_policy(service).traffic_ratio == 0.0
    lines = [json.loads(line)["what"] for line in service.audit_log.read_text().splitlines()]
    assert lines[-4:] == ["rollout start 2", "rollout pause", "rollout resume", "rollout abort"]


def test_a_dry_run_writes_nothing(service: Service, piccard: Piccard, tree_hash: Callable[[Path], str]) -> None:
    before = tree_hash(service.home)
    told = piccard(service.home, "rollout", "start", "--version=2", "--dry-run").stdout
    assert told.startswith("would have: the rollout of version 2 begins at 1 %")
    assert tree_hash(service.home) == before


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("start", "--version=1"), "version 1 is stable already"),
        (("start", "--version=7"), "there is no version 7"),
        (("start", "--version=2", "--steps=0.5"), "the last step must be 1.0"),
        (("start", "--version=2", "--steps=half,1"), "take shares such as 0.05,0.5,1"),
        (("start", "--version=2", "--gates=0.3"), "gates name no step"),
        (("start", "--version=2", "--plan=missing.yaml"), "missing.yaml cannot be read"),
        (("pause",), "no rollout is under way"),
        (("approve",), "no rollout is under way"),
        (("status", "--service=other"), "holds no service 'other'"),
    ],
)
def test_what_is_wrong_is_told(service: Service, piccard: Piccard, arguments: tuple[str, ...], told: str) -> None:
    result = piccard(service.home, "rollout", *arguments, check=False)
    assert result.returncode != 0
    assert told in result.stderr
    assert not service.rollout_file.exists()


def test_a_plan_from_a_file(service: Service, piccard: Piccard, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "steps: [0.2, 1.0]\nbake: 60\nmetrics:\n"
        "  errors: {kind: proportion, budget: 0.4, least: 0.01, margin: 0.05, proved_from: 0.0}\n"
    )
    piccard(service.home, "rollout", "start", "--version=2", f"--plan={plan}", "--interval=30", "--retire-old")
    told = json.loads(piccard(service.home, "rollout", "status", "--json").stdout)["plan"]
    assert (told["steps"], told["bake"], told["interval"], told["retire_old"]) == ([0.2, 1.0], 60, 30, True)
    assert told["metrics"]["errors"]["margin"] == 0.05
    assert told["metrics"]["token_gap"]["margin"] == 1.16


def test_a_broken_file_is_told(service: Service, piccard: Piccard) -> None:
    service.rollout_file.write_text("{")
    result = piccard(service.home, "rollout", "status", check=False)
    assert result.returncode == 1
    assert "rollout.json cannot be read" in result.stderr


def test_a_plan_is_tried_on_synthetic_traffic(command_line: Piccard) -> None:
    result = command_line("rollout", "simulate", "--runs=1", "--steps=0.05,0.5,1", "--interval=60", "--json")
    found = json.loads(result.stdout)
    assert found["errors +2 points"]["runs"] == 1
    assert set(found) >= {"equal", "truncated +0.5 points", "token gap +20 %"}
