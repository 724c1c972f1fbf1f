"""A publication looks at the checkpoint before anything else."""

import json
from pathlib import Path

import pytest
from piccard.checkpoint_folder import check_checkpoint, recorded_path
from piccard.errors import OperationError
from piccard_contract.home import Service


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["DeepseekV3ForCausalLM"]}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))
    (folder / "a.safetensors").touch()
    return folder


def test_whole_checkpoint_passes(checkpoint: Path) -> None:
    check_checkpoint(checkpoint)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "a.safetensors"])
def test_missing_file_is_named(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    with pytest.raises(OperationError, match=name):
        check_checkpoint(checkpoint)


def test_weights_without_an_index(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors.index.json").unlink()
    check_checkpoint(checkpoint)
    (checkpoint / "a.safetensors").unlink()
    with pytest.raises(OperationError, match="has no"):
        check_checkpoint(checkpoint)


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_configuration_that_is_none(checkpoint: Path, content: str) -> None:
    (checkpoint / "config.json").write_text(content)
    with pytest.raises(OperationError, match=r"config\.json"):
        check_checkpoint(checkpoint)


def test_path_is_absolute_or_relative_to_the_home(service: Service, tmp_path: Path) -> None:
    assert recorded_path(tmp_path / "elsewhere", service) == str(tmp_path / "elsewhere")
    assert recorded_path(service.home / "checkpoints" / "x", service) == "checkpoints/x"


def test_unsafe_paths_are_refused(service: Service, tmp_path: Path) -> None:
    with pytest.raises(OperationError, match="control characters"):
        recorded_path(tmp_path / "a\nb", service)
    (tmp_path / "link").symlink_to(service.repository)
    for folder in (service.repository / "x", service.home / "state", tmp_path / "link" / "x"):
        with pytest.raises(OperationError, match="keep checkpoints elsewhere"):
            recorded_path(folder, service)
