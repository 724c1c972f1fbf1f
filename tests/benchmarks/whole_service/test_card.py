"""What nvidia-smi says, and what is said where there is none."""

from pathlib import Path

import pytest
from whole_service import card


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    return tmp_path / "nvidia-smi"


def test_without_a_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert card.name() == "cpu"
    assert card.memory() == {}


def test_memory_of_the_first_card(nvidia_smi: Path) -> None:
    nvidia_smi.write_text(
        "#!/bin/sh\ncase $1 in *used,*) echo 61234, 143771; echo 1, 2;; "
        "*name) echo NVIDIA H200;; *) echo 7, 61000;; esac\n"
    )
    nvidia_smi.chmod(0o755)
    assert card.name() == "NVIDIA H200"
    assert card.memory() == {"used_mib": 61234, "total_mib": 143771, "processes": ["7, 61000"]}


def test_a_driver_that_fails_is_no_card(nvidia_smi: Path) -> None:
    nvidia_smi.write_text("#!/bin/sh\necho 'no devices were found'; exit 6\n")
    nvidia_smi.chmod(0o755)
    assert card.name() == "cpu"
