"""The stable link as it is read at every request."""

import os
from pathlib import Path

import pytest
from piccard_canary.stable_link import read_stable


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("1", "2", "01", "5-old"):
        (tmp_path / name).mkdir()
    (tmp_path / "3").write_text("a file")
    return tmp_path


def test_it_follows_a_rename_at_once(folder: Path) -> None:
    link = folder / "stable"
    link.symlink_to("1")
    assert read_stable(link) == 1

    (folder / "next").symlink_to("2")
    os.replace(folder / "next", link)
    assert read_stable(link) == 2


@pytest.mark.parametrize("target", ["9", "3", "01", "5-old", "../x", "./1", "1/", "/1", "stable", "2\n", "9" * 20])
def test_what_names_no_version(folder: Path, target: str) -> None:
    (folder / "stable").symlink_to(target)

    assert read_stable(folder / "stable") is None


def test_an_absolute_target_is_not_a_promotion(folder: Path) -> None:
    (folder / "stable").symlink_to(folder / "1")

    assert read_stable(folder / "stable") is None


def test_no_link(folder: Path) -> None:
    assert read_stable(folder / "stable") is None
    (folder / "stable").mkdir()
    assert read_stable(folder / "stable") is None
