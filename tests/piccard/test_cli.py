"""The command line over a home without a server: twice is once, a dry run writes nothing, errors are sentences."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from piccard.cli import app
from piccard.policy_store import load_policy
from piccard.repository import configured_versions, stable_target
from piccard.state_store import StateStore, operator_lock
from piccard_contract.home import Service
from piccard_contract.lifecycle import VersionState
from piccard_server import run_piccard
from typer.testing import CliRunner

Piccard = Callable[..., "subprocess.CompletedProcess[str]"]

# With what has to be done before them, which is no part of the test.
COMMANDS: list[tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]] = [
    ((), ("promote", "2")),
    ((), ("canary", "set", "--version=2", "--ratio=0.5")),
    ((), ("canary", "off")),
    ((), ("publish", "scripted", "--runner=scripted", "--label=v1.2.0")),
    ((), ("publish", "scripted", "--runner=scripted", "--label=v1.0.0", "--service=other")),
    ((("canary", "off"),), ("retire", "2")),
    ((("promote", "2"),), ("retire", "1", "--force")),
]
# A rollback done twice leads back, so it is no command of which twice is once.
DRY = [*COMMANDS, ((("promote", "2"),), ("rollback",))]


def ids(cases: list[Any]) -> list[str]:
    return [" ".join(command[:2]) for _, command in cases]


def audit(service: Service) -> list[dict[str, Any]]:
    return [json.loads(line) for line in service.audit_log.read_text().splitlines()]


def states(service: Service) -> dict[int, VersionState]:
    return {number: record.state for number, record in StateStore(service).read().versions.items()}


@pytest.mark.parametrize(("before", "command"), COMMANDS, ids=ids(COMMANDS))
def test_done_twice_is_done_once(
    service: Service, piccard: Piccard, before: tuple[tuple[str, ...], ...], command: tuple[str, ...]
) -> None:
    for earlier in before:
        piccard(service.home, *earlier)
    known = len(audit(service))
    first = json.loads(piccard(service.home, *command, "--json").stdout)
    after = StateStore(service).read(), load_policy(service)
    second = json.loads(piccard(service.home, *command, "--json").stdout)
    assert (first["changed"], second["changed"]) == (True, False)
    assert (StateStore(service).read(), load_policy(service)) == after
    assert len([line for line in audit(service)[known:] if not line["what"].startswith("init")]) == 1


@pytest.mark.parametrize(("before", "command"), DRY, ids=ids(DRY))
def test_dry_run_writes_nothing(
    service: Service,
    piccard: Piccard,
    before: tuple[tuple[str, ...], ...],
    command: tuple[str, ...],
    tree_hash: Callable[[Path], str],
) -> None:
    for earlier in before:
        piccard(service.home, *earlier)
    tree = tree_hash(service.home)
    told = json.loads(piccard(service.home, *command, "--json", "--dry-run").stdout)
    assert told["changed"]
    assert told["dry_run"]
    assert tree_hash(service.home) == tree
    # What it said is what is done.
    done = json.loads(piccard(service.home, *command, "--json").stdout)
    assert {**done, "dry_run": True} == told


def test_init_twice_and_dry(tmp_path: Path, piccard: Piccard) -> None:
    home = tmp_path / "home"
    told = json.loads(piccard(home, "init", "--runner=scripted", "--dry-run", "--json").stdout)
    assert told["changed"]
    assert not home.exists()
    told = json.loads(piccard(home, "init", "--runner=scripted", "--json").stdout)
    assert told["after"] == {"versions": [1, 2]}
    told = json.loads(piccard(home, "init", "--runner=scripted", "--json").stdout)
    assert not told["changed"]
    service = Service(home)
    assert states(service) == {1: VersionState.STABLE, 2: VersionState.CANARY}
    policy = load_policy(service)
    assert (policy.canary, policy.traffic_ratio) == (2, 0.1)
    assert stable_target(service) == 1


def test_audit_tells_who_did_what_when_and_from_what_to_what(service: Service, piccard: Piccard) -> None:
    piccard(service.home, "promote", "2")
    line = audit(service)[-1]
    assert line["what"] == "promote 2"
    assert line["from"] == {"stable": 1, "canary": 2, "previous": None}
    assert line["to"] == {"stable": 2, "canary": None, "previous": 1}
    assert line["who"]
    assert line["time"].endswith("+00:00")
    assert "failed" not in line


def test_promote_and_rollback(service: Service, piccard: Piccard) -> None:
    piccard(service.home, "promote", "2")
    assert states(service) == {1: VersionState.PREVIOUS, 2: VersionState.STABLE}
    assert stable_target(service) == 2
    assert configured_versions(service) == [2]
    assert load_policy(service).canary is None
    piccard(service.home, "rollback")
    assert states(service) == {1: VersionState.STABLE, 2: VersionState.PREVIOUS}
    assert stable_target(service) == 1
    assert configured_versions(service) == [1]

    told = json.loads(piccard(service.home, "rollback", "--json").stdout)
    assert told["after"] == {"stable": 2, "previous": 1, "canary": None}
    assert states(service) == {1: VersionState.PREVIOUS, 2: VersionState.STABLE}
    assert stable_target(service) == 2
    assert configured_versions(service) == [2]


def test_rolled_back_version_gets_a_second_chance_as_canary(service: Service, piccard: Piccard) -> None:
    piccard(service.home, "promote", "2")
    piccard(service.home, "rollback")
    piccard(service.home, "canary", "set", "--version=2", "--ratio=0.01")
    state = StateStore(service).read()
    assert (state.canary, state.previous) == (2, None)
    assert states(service)[2] is VersionState.CANARY


def test_retire_without_a_server(service: Service, piccard: Piccard) -> None:
    piccard(service.home, "canary", "off")
    piccard(service.home, "retire", "2")
    assert states(service)[2] is VersionState.RETIRED
    told = json.loads(piccard(service.home, "retire", "2", "--json").stdout)
    assert not told["changed"]


def test_previous_version_bakes(service: Service, piccard: Piccard) -> None:
    piccard(service.home, "promote", "2")
    refused = piccard(service.home, "retire", "1", check=False)
    assert refused.returncode == 1
    assert "--force" in refused.stderr
    piccard(service.home, "retire", "1", "--force")
    assert states(service) == {1: VersionState.RETIRED, 2: VersionState.STABLE}
    assert StateStore(service).read().previous is None


def test_numbers_are_never_used_twice(service: Service, piccard: Piccard) -> None:
    for label in ("a", "b"):
        told = json.loads(
            piccard(service.home, "publish", "scripted", "--runner=scripted", f"--label={label}", "--json").stdout
        )
        number = told["after"]["version"]
        piccard(service.home, "retire", str(number))
    assert sorted(states(service)) == [1, 2, 3, 4]


def test_publication_is_a_snapshot_unless_linked(service: Service, piccard: Piccard) -> None:
    piccard(service.home, "publish", "scripted", "--runner=scripted", "--label=a")
    piccard(service.home, "publish", "scripted", "--runner=scripted", "--label=b", "--linked")
    assert (service.version_folder(3) / "code" / "deepseek_engine" / "server_model.py").is_file()
    assert not (service.version_folder(4) / "code").exists()
    assert states(service)[3] is VersionState.STAGED
    assert not any(service.staging.iterdir())


REFUSED = [
    (("promote", "9"), "there are: 1, 2"),
    (("promote", "0"), "--help"),
    (("retire", "1"), "promote another first"),
    (("retire", "2"), "canary off"),
    (("rollback",), "no previous version"),
    (("canary", "set", "--version=1", "--ratio=0.1"), "is stable"),
    (("canary", "set", "--version=2", "--ratio=1.5"), "0 to 1"),
    (("canary", "set", "--version=2", "--ratio=nan"), "0 to 1"),
    (("publish", "/nowhere"), "no folder"),
    (("publish", "scripted", "--runner=scripted", "--label=v1.0.0"), "another --label"),
    (("publish", "scripted", "--runner=scripted", "--label=two\nlines"), "one line"),
    (("publish", "scripted", "--runner=scripted", "--label=../up"), "--label"),
    (("publish", "scripted", "--runner=scripted", "--label=x", "--profile=fast"), "profile"),
    (("publish", "scripted", "--runner=scripted", "--label=x", "--device=tpu"), "device"),
    (("status", "--service=Not-A-Name"), "not a service name"),
    (("status", "--service=keys"), "cannot be a service's name"),
    (("status", "--service=other"), "no service other"),
    (("init", "--runner=magic"), "torch, onnxruntime, scripted"),
]


@pytest.mark.parametrize(("command", "told"), REFUSED, ids=[" ".join(command) for command, _ in REFUSED])
def test_refusal_is_a_sentence_and_changes_nothing(
    service: Service, piccard: Piccard, command: tuple[str, ...], told: str
) -> None:
    before = StateStore(service).read()
    result = piccard(service.home, *command, check=False)
    assert result.returncode in (1, 2)
    assert told in result.stderr.replace("\n", " ") or told in result.stderr
    assert "Traceback" not in result.stderr
    assert StateStore(service).read() == before
    assert [line["what"] for line in audit(service)] == [f"init {service.home}"]


@pytest.mark.parametrize("text", [None, "", "canary: two"])
def test_without_a_policy_no_canary_is_set(service: Service, piccard: Piccard, text: str | None) -> None:
    before = StateStore(service).read()
    service.policy_file.unlink() if text is None else service.policy_file.write_text(text)
    result = piccard(service.home, "canary", "set", "--version=2", "--ratio=0.5", check=False)
    assert result.returncode == 1
    assert str(service.policy_file) in result.stderr
    assert "canary off" in result.stderr
    assert StateStore(service).read() == before


@pytest.mark.parametrize("command", [("promote", "2"), ("rollback",), ("canary", "off")])
@pytest.mark.parametrize("text", [None, "", "canary: two"])
def test_no_edit_of_the_policy_stands_in_the_way(
    service: Service, piccard: Piccard, command: tuple[str, ...], text: str | None
) -> None:
    if command == ("rollback",):
        piccard(service.home, "promote", "2")
    service.policy_file.unlink() if text is None else service.policy_file.write_text(text)
    piccard(service.home, *command)
    wanted = {("promote", "2"): 2}.get(command, 1)
    assert (StateStore(service).read().stable, stable_target(service)) == (wanted, wanted)
    assert load_policy(service).canary is None


def test_a_ratio_of_minus_zero_is_zero(service: Service, piccard: Piccard) -> None:
    told = json.loads(piccard(service.home, "canary", "set", "--version=2", "--ratio=-0.0", "--json").stdout)
    assert told["message"].endswith("gets 0 % of the traffic")


def test_no_home(tmp_path: Path, piccard: Piccard) -> None:
    result = piccard(tmp_path / "none", "status", check=False)
    assert result.returncode == 1
    assert "piccard init" in result.stderr


def test_second_operator_waits_and_is_told(service: Service, piccard: Piccard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piccard.operation.operator_lock", partial(operator_lock, timeout=0.1))
    with operator_lock(service.home):
        result = piccard(service.home, "promote", "2", check=False)
    assert result.returncode == 1
    assert "another process is changing this home" in result.stderr
    assert stable_target(service) == 1


def test_operators_at_once_leave_one_truth(service: Service) -> None:
    commands = [("promote", "2"), ("canary", "off"), ("publish", "scripted", "--runner=scripted", "--label=x")]
    threads = [threading.Thread(target=run_piccard, args=(service.home, *command)) for command in commands]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert states(service) == {1: VersionState.PREVIOUS, 2: VersionState.STABLE, 3: VersionState.STAGED}
    assert len(audit(service)) in (3, 4)


def test_status_as_json_and_as_text(service: Service, piccard: Piccard) -> None:
    found = json.loads(piccard(service.home, "status", "--json").stdout)
    assert (found["stable"], found["link"], found["canary"], found["server"]) == (1, 1, 2, None)
    assert [version["version"] for version in found["versions"]] == [1, 2]
    text = piccard(service.home, "status").stdout
    assert "no server runs" in text
    assert "canary 2 gets 10 %" in text


def test_every_command_has_help() -> None:
    runner = CliRunner()
    for command in app.registered_commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__
        result = runner.invoke(app, [name, "--help"])
        assert result.exit_code == 0
        assert command.callback.__doc__
        assert command.callback.__doc__.split(".")[0][:20] in result.output


def test_start_imports_nothing_heavy() -> None:
    program = "import sys, piccard.cli; print(*(m for m in ('torch', 'tritonclient', 'numpy') if m in sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""
