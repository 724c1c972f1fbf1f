"""A full disk, a read-only folder, a clock that was set back, and two operators: a clear sentence, a whole state."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from operations import operation_of
from piccard.errors import OperationError
from piccard.policy_store import load_policy
from piccard.repository import configured_versions, stable_target
from piccard.retire import BAKE_TIME, retire
from piccard.state_store import StateStore, operator_lock
from piccard_contract.home import Service
from piccard_contract.lifecycle import ServiceState, VersionState
from write_points import Killed, WritePoints

Piccard = Callable[..., "subprocess.CompletedProcess[str]"]

COMMANDS = [
    ("promote", "2"),
    ("canary", "set", "--version=2", "--ratio=0.5"),
    ("canary", "off"),
    ("publish", "scripted", "--runner=scripted", "--label=v3", "--linked"),
]


def view(service: Service) -> tuple[object, ...]:
    """What a command that failed leaves as it was; numbers that were given away stay given away."""
    state = StateStore(service).read().model_copy(update={"generation": 0, "next_version": 0})
    policy = service.policy_file.read_text()
    return state, policy, stable_target(service), configured_versions(service)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES], ids=errno.errorcode.get)
@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: arguments[0])
def test_write_that_fails_is_told_and_undone(
    service: Service, piccard: Piccard, arguments: tuple[str, ...], number: int
) -> None:
    before = view(service)
    points = WritePoints(opens=True)
    with points.installed():
        for at in range(100):
            with points.armed(fail_at=at, number=number):
                result = piccard(service.home, *arguments, check=False)
            if result.returncode == 0:
                break
            assert os.strerror(number) in result.stderr
            assert "Traceback" not in result.stderr
            assert view(service) == before
    assert result.returncode == 0
    # The last write is the audit log's: without it the change stands, and that is said.
    assert "the audit log has no line of it" in result.stderr
    assert at >= 3
    assert view(service) != before


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: arguments[0])
def test_disk_that_stays_full_is_mended_by_doctor(
    service: Service, piccard: Piccard, arguments: tuple[str, ...]
) -> None:
    points = WritePoints(opens=True)
    with points.installed():
        for at in range(12):
            with points.armed(fail_at=at, for_good=True):
                result = piccard(service.home, *arguments, check=False)
            assert "Traceback" not in result.stderr
            assert result.returncode == 0 or "\npiccard: " in f"\n{result.stderr}"
            assert stable_target(service) in (1, 2)
            piccard(service.home, "doctor", "--repair", check=False)
            state = StateStore(service).read()
            assert stable_target(service) == state.stable
            assert configured_versions(service) == [state.stable]
            assert load_policy(service).canary == state.canary


# Killed as it renames the link: state and configuration say 2 by then, and requests still go to 1.
PROMOTION = """
import os, signal, sys
from pathlib import Path
from piccard.__main__ import main
rename = os.replace
def replace(source, target, **options):
    if Path(target).is_symlink():
        os.kill(os.getpid(), signal.SIGKILL)
    rename(source, target, **options)
os.replace = replace
main(["promote", "2", f"--home={sys.argv[1]}"])
"""


def test_a_real_kill_leaves_what_its_double_leaves(service: Service, piccard: Piccard, tmp_path: Path) -> None:
    twin = Service(shutil.copytree(service.home, tmp_path / "twin", symlinks=True), service.name)
    killed = subprocess.run(
        [sys.executable, "-c", PROMOTION, str(service.home)], capture_output=True, text=True, check=False, timeout=120
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    kill_at_rename_of_link(twin, piccard)

    assert comparable(service) == comparable(twin)
    assert StateStore(service).read().stable == 2
    assert stable_target(service) == 1
    piccard(service.home, "doctor", "--repair", check=False)
    assert stable_target(service) == 2


def kill_at_rename_of_link(service: Service, piccard: Piccard) -> None:
    """The same kill by an exception, at the point that a run to the end names."""
    spare = Service(shutil.copytree(service.home, service.home.with_name("spare"), symlinks=True), service.name)
    points = WritePoints()
    with points.installed():
        with points.armed():
            piccard(spare.home, "promote", "2")
        link = f"replace {spare.home}/.stable."
        at = next(number for number, name in enumerate(points.passed) if name.startswith(link))
        at -= sum(name.startswith("fsync") for name in points.passed[:at])
        with points.armed(kill_at=at), pytest.raises(Killed):
            piccard(service.home, "promote", "2", check=False)


def comparable(service: Service) -> dict[str, str]:
    """Every file and link of a home with its content, but for times, process ids and the home's own path."""
    found = {}
    for path in sorted(service.home.rglob("*")):
        name = re.sub(r"\.[0-9]+\.tmp$", ".PID.tmp", str(path.relative_to(service.home)))
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file() and path.suffix not in (".lock", ".pyc"):
            text = re.sub(rf"{service.home.parent}/(home|twin)\b", "HOME", path.read_text(errors="replace"))
            found[name] = re.sub(r"[0-9-]{10}T[0-9:.]+(\+00:00|Z)", "TIME", text)
    return found


def promoted(service: Service, piccard: Piccard, since: datetime) -> ServiceState:
    piccard(service.home, "promote", "2")
    with StateStore(service).change() as state:
        state.previous_since = since.isoformat(timespec="milliseconds")
    return StateStore(service).read()


@pytest.mark.parametrize(("age", "goes"), [(timedelta(0), False), (BAKE_TIME * 0.99, False), (BAKE_TIME * 1.01, True)])
def test_previous_is_kept_for_its_bake_time(service: Service, piccard: Piccard, age: timedelta, goes: bool) -> None:
    promoted(service, piccard, datetime.now(UTC) - age)
    if not goes:
        with pytest.raises(OperationError, match=r"returns to until .* or retire it with --force"):
            retire(operation_of(service), 1, force=False, wait=0.0)
        assert StateStore(service).read().versions[1].state is VersionState.PREVIOUS
    retire(operation_of(service), 1, force=not goes, wait=0.0)
    state = StateStore(service).read()
    assert state.versions[1].state is VersionState.RETIRED
    assert (state.previous, state.previous_since) == (None, None)


def test_clock_that_was_set_back(service: Service, piccard: Piccard) -> None:
    """A promotion that is dated in the future would else bake until then."""
    promoted(service, piccard, datetime.now(UTC) + timedelta(days=400))
    with pytest.raises(OperationError, match=r"the clock was set back.*doctor --repair"):
        retire(operation_of(service), 1, force=False, wait=0.0)

    assert "repaired  clock" in piccard(service.home, "doctor", "--repair", check=False).stdout

    since = StateStore(service).read().previous_since
    assert since is not None
    assert abs(datetime.fromisoformat(since) - datetime.now(UTC)) < timedelta(minutes=5)
    with pytest.raises(OperationError, match="returns to until"):
        retire(operation_of(service), 1, force=False, wait=0.0)


def test_order_of_writes_does_not_hang_on_the_clock(
    service: Service, piccard: Piccard, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = StateStore(service).read().generation
    monkeypatch.setattr("piccard_contract.lifecycle.now", lambda: "1990-01-01T00:00:00.000+00:00")
    piccard(service.home, "promote", "2")
    state = StateStore(service).read()
    assert state.generation > first
    assert state.versions[1].changed_at < state.versions[1].published_at
    assert stable_target(service) == 2


def test_two_operators_at_once(service: Service) -> None:
    """Two processes change stable again and again; each command comes whole or not at all."""
    workers = [start(service.home, own, other) for own, other in ((1, 2), (2, 1))]
    for worker in workers:
        out, _ = worker.communicate(timeout=240)
        assert worker.returncode == 0, out
    state = StateStore(service).read()
    assert {state.stable, state.previous} == {1, 2}
    assert stable_target(service) == state.stable
    assert configured_versions(service) == [state.stable]
    assert load_policy(service).canary is state.canary is None


def start(home: Path, first: int, second: int) -> "subprocess.Popen[str]":
    # Neither waits in turn: with a slow disk one may find the lock taken for longer than a command waits.
    program = f"""
from functools import partial
from pathlib import Path
from piccard import operation as module
from piccard.operation import operation
from piccard.promote import promote
module.operator_lock = partial(module.operator_lock, timeout=200)
for version in [{first}, {second}] * 10:
    with operation(Path({str(home)!r}), "deepseek") as op:
        promote(op, version)
"""
    return subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_operator_that_waits_in_vain_is_told(service: Service) -> None:
    with operator_lock(service.home):
        program = (
            f"from pathlib import Path; from piccard.state_store import operator_lock\n"
            f"with operator_lock(Path({str(service.home)!r}), timeout=0.2): pass"
        )
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert f"another process is changing this home ({service.home}/state/operator.lock is held by process" in (
        result.stderr
    )
    assert str(os.getpid()) in result.stderr
