"""Files of a home: replaced whole, pinned, secret, swapped by one rename."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from piccard.durable_file import write_durably
from piccard.keys import make_secret, read_secret, secret_problem
from piccard.pin import PIN_TIME, pin_problem, set_pin
from piccard.repository import point_stable, stable_target, version_numbers
from piccard.shared_memory import dead_regions, home_prefix, server_prefix
from piccard.undo import Steps
from piccard_contract.home import Service


def test_write_replaces_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_durably(path, "old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_durably(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_pin_is_the_newest_whatever_is_written(tmp_path: Path) -> None:
    assert pin_problem(tmp_path) is not None
    set_pin(tmp_path)
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.py").touch()
    assert pin_problem(tmp_path) is None
    os.utime(tmp_path / "1" / "model.py", (PIN_TIME, PIN_TIME))
    assert pin_problem(tmp_path) is not None


def test_secret_is_its_owner_s(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "admin.key"
    secret = make_secret(path)
    assert read_secret(path) == secret
    assert len(secret) >= 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert secret_problem(path) is None
    path.chmod(0o640)
    assert secret_problem(path) is not None
    assert make_secret(path) != secret


def test_stable_never_dangles(service: Service) -> None:
    with pytest.raises(FileNotFoundError, match="must not dangle"):
        point_stable(service, 77)
    assert stable_target(service) == 1
    point_stable(service, 2)
    assert stable_target(service) == 2
    assert version_numbers(service) == [1, 2]
    assert sorted(entry.name for entry in service.home.iterdir()) == ["model_repository", "staging", "state"]


def test_regions_of_the_living_server_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piccard.shared_memory.SHARED_MEMORY", tmp_path)
    home = tmp_path / "home"
    # Who started it may be gone: the name alone counts.
    living = server_prefix(home, 99999999)
    alive = tmp_path / f"{living}x"
    dead = tmp_path / f"{server_prefix(home, 999999999)}x"
    other = tmp_path / f"{server_prefix(tmp_path / 'other', 999999999)}x"
    for path in (alive, dead, other):
        path.touch()
    assert dead_regions(home, living) == [dead]
    assert dead_regions(home) == sorted([alive, dead])
    assert home_prefix(home) != home_prefix(tmp_path / "other")


def take_steps(done: list[str], last_undo: Callable[[], object]) -> None:
    with Steps() as steps:
        steps.do(lambda: done.append("one"), undo=lambda: done.append("undo one"))
        steps.do(lambda: done.append("two"), undo=last_undo)
        raise RuntimeError("third")


def test_steps_are_undone_last_first() -> None:
    done: list[str] = []
    with pytest.raises(RuntimeError, match="third"):
        take_steps(done, lambda: done.append("undo two"))
    assert done == ["one", "two", "undo two", "undo one"]


def test_failed_undo_is_noted_and_the_others_go_on() -> None:
    done: list[str] = []

    def fail() -> None:
        raise OSError("still no")

    with pytest.raises(RuntimeError, match="third") as caught:
        take_steps(done, fail)
    assert done == ["one", "two", "undo one"]
    assert "still no" in caught.value.__notes__[0]
