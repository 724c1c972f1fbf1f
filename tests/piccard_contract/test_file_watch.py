"""A change of a file is never overlooked."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from piccard_contract import file_watch
from piccard_contract.file_watch import SETTLED, FileWatch


def written_long_ago(path: Path, text: str) -> None:
    path.write_text(text)
    long_ago = time.time() - 100
    os.utime(path, (long_ago, long_ago))


def test_the_first_look_is_a_change(tmp_path: Path) -> None:
    assert FileWatch(tmp_path / "none").changed()


def test_a_settled_file_is_read_once(tmp_path: Path) -> None:
    written_long_ago(tmp_path / "a", "one")
    watch = FileWatch(tmp_path / "a")

    assert watch.changed()
    assert not watch.changed()


def test_a_fresh_file_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Another write may bear the same time.
    (tmp_path / "a").write_text("one")
    written = (tmp_path / "a").stat().st_mtime
    watch = FileWatch(tmp_path / "a")

    monkeypatch.setattr(file_watch, "time", SimpleNamespace(time=lambda: written + 0.9 * SETTLED))
    assert watch.changed()
    assert watch.changed()
    monkeypatch.setattr(file_watch, "time", SimpleNamespace(time=lambda: written + 1.1 * SETTLED))
    assert watch.changed()
    assert not watch.changed()


@pytest.mark.parametrize("how", ["size", "time", "inode", "gone"])
def test_every_change_is_seen(tmp_path: Path, how: str) -> None:
    path = tmp_path / "a"
    written_long_ago(path, "one")
    times = (path.stat().st_atime, path.stat().st_mtime)
    watch = FileWatch(path)
    watch.changed()
    assert not watch.changed()

    if how == "size":
        path.write_text("longer")
        os.utime(path, times)
    elif how == "time":
        os.utime(path)
    elif how == "inode":
        (tmp_path / "b").write_text("two")
        os.utime(tmp_path / "b", times)
        os.replace(tmp_path / "b", path)
    else:
        path.unlink()

    assert watch.changed()
