"""Puts tests/support on the path and offers the fixtures that several areas share."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))


@pytest.fixture(scope="session")
def checkpoint_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a small random checkpoint of a family (random_checkpoints.FAMILIES), made once a session."""
    from random_checkpoints import make_checkpoint

    folders: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in folders:
            folders[family] = make_checkpoint(family, tmp_path_factory.mktemp(family))
        return folders[family]

    return folder
