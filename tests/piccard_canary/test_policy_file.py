"""policy.yaml while it is edited."""

import os
from pathlib import Path

import pytest
from piccard_canary.policy_file import PolicyFile
from piccard_contract.policy import Policy


def test_a_change_acts_on_the_next_request(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(Policy(canary=2).dump())
    file = PolicyFile(path)
    started_with = file.current()

    # Faster than time stamps tell apart, and of the same size.
    for version in range(3, 10):
        path.write_text(Policy(canary=version).dump())
        assert file.current().canary == version
    # A request keeps the policy that it started with.
    assert started_with.canary == 2
    assert file.error == ""


@pytest.mark.parametrize("broken", ["traffic_ratio: 2", "{", "", "\x00"])
def test_a_broken_edit_keeps_the_last_good_one(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(Policy(canary=2).dump())
    file = PolicyFile(path)
    file.current()

    path.write_text(broken)
    assert file.current().canary == 2
    assert "last good policy stays in use" in file.error

    path.write_text(Policy(canary=3).dump())
    assert file.current().canary == 3
    assert file.error == ""


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_bytes(b"salt: \xff")
    file = PolicyFile(path)

    assert file.current() == Policy()
    assert file.error


def test_without_a_file_all_goes_to_stable(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    file = PolicyFile(path)
    assert file.current() == Policy()
    assert str(path) in file.error

    (tmp_path / "new").write_text(Policy(canary=4).dump())
    os.replace(tmp_path / "new", path)
    assert file.current().canary == 4

    path.unlink()
    assert file.current().canary == 4
    assert file.error


def test_an_edit_in_progress_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(Policy(canary=2, traffic_ratio=0.5).dump())
    file = PolicyFile(path)
    file.current()
    whole = Policy(canary=3, traffic_ratio=0.5).dump()
    read = Path.read_bytes

    def while_the_editor_writes(self: Path) -> bytes:
        half = read(self)
        path.write_text(whole)
        return half

    path.write_text("canary: 3\n")
    monkeypatch.setattr(Path, "read_bytes", while_the_editor_writes)
    # Half of it would mean a ratio of 0.
    assert file.current().traffic_ratio == 0.5
    monkeypatch.setattr(Path, "read_bytes", read)
    assert file.current() == Policy(canary=3, traffic_ratio=0.5)
