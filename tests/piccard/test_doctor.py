"""Doctor finds every trap that is laid, says what to do, and mends what can be mended."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from operations import operation_of
from piccard import doctor as module
from piccard.doctor import doctor, findings
from piccard.finding import Finding
from piccard.keys import admin_key_path
from piccard.pin import PIN_NAME, set_pin
from piccard.policy_store import update_policy
from piccard.repository import configured_versions, stable_target, write_stable_config
from piccard.shared_memory import SHARED_MEMORY, dead_regions, home_prefix
from piccard.state_store import StateStore
from piccard_contract.home import Service
from piccard_contract.lifecycle import VersionState

Piccard = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(autouse=True)
def _any_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    # The default ports may be taken on the machine that tests run on; test_prerequisites looks at ports.
    monkeypatch.setattr(module, "problems", lambda *_, **__: [])


def traps(service: Service) -> set[str]:
    return {finding.trap for finding in findings(operation_of(service))}


def found(service: Service, trap: str) -> Finding:
    return next(finding for finding in findings(operation_of(service)) if finding.trap == trap)


def test_new_home_is_healthy(service: Service) -> None:
    assert list(findings(operation_of(service))) == []


def remove_link(service: Service) -> None:
    service.stable_link.unlink()


def point_elsewhere(service: Service) -> None:
    service.stable_link.unlink()
    service.stable_link.symlink_to("2")


def link_to_nothing(service: Service) -> None:
    service.stable_link.unlink()
    service.stable_link.symlink_to("77")


def name_other_version(service: Service) -> None:
    write_stable_config(service, 2)


def change_tensors(service: Service) -> None:
    path = service.repository / service.router / "config.pbtxt"
    path.write_text(path.read_text() + "# by hand\n")


def remove_pin(service: Service) -> None:
    (service.repository / service.router / PIN_NAME).unlink()


def copy_home_without_times(service: Service) -> None:
    os.utime(service.llm_folder / PIN_NAME)


def write_newer_than_the_pin(service: Service) -> None:
    note = service.version_folder(1) / "note"
    note.touch()
    os.utime(note, (2_145_830_500, 2_145_830_500))
    set_pin(service.llm_folder)


def remove_compiled(service: Service) -> None:
    shutil.rmtree(service.version_folder(2) / "__pycache__")


def compile_with_times(service: Service) -> None:
    path = service.version_folder(2) / "model.py"
    subprocess.run([sys.executable, "-m", "py_compile", str(path)], check=True)


def open_key(service: Service) -> None:
    admin_key_path(service.home).chmod(0o644)


def remove_key(service: Service) -> None:
    admin_key_path(service.home).unlink()


def name_other_canary(service: Service) -> None:
    update_policy(service, canary=1)


def leave_draining(service: Service) -> None:
    store = StateStore(service)
    with store.change() as state:
        state.canary = None
        state.move(2, VersionState.READY)
        state.move(2, VersionState.DRAINING)
    update_policy(service, canary=None, traffic_ratio=0.0)


def leave_staging(service: Service) -> None:
    (service.staging / "3").mkdir(parents=True)


def leave_region(service: Service) -> None:
    (SHARED_MEMORY / f"{home_prefix(service.home)}_999999999_left").touch()


REPAIRABLE: list[tuple[str, Callable[[Service], None]]] = [
    ("stable-link", remove_link),
    ("stable-link", point_elsewhere),
    ("stable-link", link_to_nothing),
    ("config", name_other_version),
    ("config", change_tensors),
    ("pin", remove_pin),
    ("pin", copy_home_without_times),
    ("pycache", remove_compiled),
    ("pycache", compile_with_times),
    ("admin-key", open_key),
    ("admin-key", remove_key),
    ("policy", name_other_canary),
    ("interrupted", leave_draining),
    ("staging", leave_staging),
    ("shared-memory", leave_region),
]


@pytest.mark.parametrize(("trap", "lay"), REPAIRABLE, ids=[lay.__name__ for _, lay in REPAIRABLE])
def test_trap_is_found_and_repaired(service: Service, trap: str, lay: Callable[[Service], None]) -> None:
    lay(service)
    try:
        finding = found(service, trap)
        assert finding.problem
        assert finding.remedy
        left, repaired = doctor(operation_of(service), repair=True)
        assert trap in {finding.trap for finding in repaired}
        assert left == []
        assert list(findings(operation_of(service))) == []
        audit = [json.loads(line) for line in service.audit_log.read_text().splitlines()]
        assert f"doctor --repair {trap}" in {line["what"] for line in audit}
    finally:
        for region in dead_regions(service.home):
            region.unlink()


def test_repair_follows_the_state(service: Service) -> None:
    point_elsewhere(service)
    name_other_version(service)
    doctor(operation_of(service), repair=True)
    assert stable_target(service) == 1
    assert configured_versions(service) == [1]


def odd_name(service: Service) -> None:
    (service.llm_folder / "5-old").mkdir()


def long_name(service: Service) -> None:
    (service.llm_folder / ("1" * 20)).mkdir()


def leading_zero(service: Service) -> None:
    (service.llm_folder / "007").mkdir()


def stray_note(service: Service) -> None:
    (service.llm_folder / "notes.txt").touch()


def dangling_in_root(service: Service) -> None:
    (service.repository / "old").symlink_to("nowhere")


def unknown_version(service: Service) -> None:
    shutil.copytree(service.version_folder(2), service.version_folder(9))


def broken_version_file(service: Service) -> None:
    (service.version_folder(2) / "version.yaml").write_text("label: [")


def missing_checkpoint(service: Service) -> None:
    path = service.version_folder(2) / "version.yaml"
    path.write_text(path.read_text().replace("runner: scripted", "runner: torch"))


def broken_policy(service: Service) -> None:
    service.policy_file.write_text("traffic_ratio: 7\n")


def broken_rollout(service: Service) -> None:
    service.rollout_file.write_bytes(b'{"schema": 2')


def broken_golden_prompts(service: Service) -> None:
    service.golden_prompts.write_text('{"text": "a"}\n')


def broken_gateway_file(service: Service) -> None:
    service.gateway_file.write_bytes(b"# f\xfcr")


def broken_keys(service: Service) -> None:
    service.gateway_keys.write_text('{"keys": 5}')


def link_is_a_folder(service: Service) -> None:
    service.stable_link.unlink()
    service.stable_link.mkdir()


def broken_state(service: Service) -> None:
    service.state_json.write_text("{")


def state_of_another_kind(service: Service) -> None:
    service.state_json.write_bytes(b"\xff\xfe\0")


FOR_PEOPLE: list[tuple[str, Callable[[Service], None]]] = [
    ("folder-name", odd_name),
    ("folder-name", long_name),
    ("folder-name", leading_zero),
    ("folder-name", stray_note),
    ("dangling-link", dangling_in_root),
    ("dangling-link", link_to_nothing),
    ("unknown-version", unknown_version),
    ("version", broken_version_file),
    ("checkpoint", missing_checkpoint),
    ("policy", broken_policy),
    ("rollout", broken_rollout),
    ("golden", broken_golden_prompts),
    ("gateway", broken_gateway_file),
    ("keys", broken_keys),
    ("stable-link", link_is_a_folder),
    ("state", broken_state),
    ("state", state_of_another_kind),
    ("pin", write_newer_than_the_pin),
]


@pytest.mark.parametrize(("trap", "lay"), FOR_PEOPLE, ids=[lay.__name__ for _, lay in FOR_PEOPLE])
def test_trap_is_found_and_told(service: Service, trap: str, lay: Callable[[Service], None]) -> None:
    lay(service)
    finding = found(service, trap)
    assert finding.problem
    assert finding.remedy
    assert "For further information" not in finding.problem


def test_changed_snapshot_is_found(service: Service, piccard: Piccard) -> None:
    piccard(service.home, "publish", "scripted", "--runner=scripted", "--label=v1.2.0")
    assert traps(service) == set()
    with open(service.version_folder(3) / "code" / "piccard_contract" / "home.py", "a") as file:
        file.write("\n")
    assert "code" in traps(service)


def test_missing_prerequisite_is_told(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    lacks = ["numpy is 2.1.0, the wheel's tritonserver needs numpy 1; run `pip install 'numpy<2'`"]
    monkeypatch.setattr(module, "problems", lambda *_, **__: lacks)
    finding = found(service, "numpy")
    assert finding.remedy == "run `pip install 'numpy<2'`"


def test_command_tells_and_exits_with_1(service: Service, piccard: Piccard) -> None:
    odd_name(service)
    result = piccard(service.home, "doctor", "--json", check=False)
    assert result.returncode == 1
    told = json.loads(result.stdout)
    assert "folder-name" in {finding["trap"] for finding in told["after"]["findings"]}
    result = piccard(service.home, "doctor", check=False)
    assert "5-old" in result.stdout


def test_dry_run_repairs_nothing(service: Service, piccard: Piccard, tree_hash: Callable[[Path], str]) -> None:
    point_elsewhere(service)
    before = tree_hash(service.home)
    assert piccard(service.home, "doctor", "--repair", "--dry-run", check=False).returncode == 1
    assert tree_hash(service.home) == before
