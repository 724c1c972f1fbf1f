"""A publication looks at the checkpoint before anything else."""

import json
import os
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


@pytest.mark.parametrize("name", ["config.json", "a.safetensors", "chat_template.jinja", "extra"])
@pytest.mark.parametrize("target", ["/etc/hostname", "../secret", "nowhere", "."])
def test_links_out_of_a_checkpoint_are_refused(checkpoint: Path, name: str, target: str) -> None:
    (checkpoint.parent / "secret").write_text("{}")
    (checkpoint / name).unlink(missing_ok=True)
    (checkpoint / name).symlink_to(target)
    if target == "." and name in ("extra", "chat_template.jinja"):
        # It leads nowhere else; that it is a folder is found when it is read.
        check_checkpoint(checkpoint)
        return
    with pytest.raises(OperationError, match=name):
        check_checkpoint(checkpoint)


def test_links_of_a_hugging_face_cache_are_taken(checkpoint: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models--deepseek-ai--x"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    for path in checkpoint.iterdir():
        path.rename(cache / "blobs" / f"blob-{path.name}")
        (snapshot / path.name).symlink_to(f"../../blobs/blob-{path.name}")
    check_checkpoint(snapshot)
    # Another model's files are not this one's.
    (tmp_path / "secret").write_text("x")
    (snapshot / "chat_template.jinja").symlink_to("../../../secret")
    with pytest.raises(OperationError, match=r"chat_template\.jinja leads to"):
        check_checkpoint(snapshot)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "extra"])
def test_what_is_no_file_is_refused(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink(missing_ok=True)
    os.mkfifo(checkpoint / name)
    with pytest.raises(OperationError, match="no regular file"):
        check_checkpoint(checkpoint)


@pytest.mark.parametrize("shard", ["../a.safetensors", "/etc/hostname", "..", "sub/a.safetensors", "a\nb", ""])
def test_an_index_names_files_beside_it_alone(checkpoint: Path, shard: str) -> None:
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": shard}}))
    (checkpoint.parent / "a.safetensors").touch()
    with pytest.raises(OperationError, match="no file beside it"):
        check_checkpoint(checkpoint)


@pytest.mark.parametrize("content", ["[" * 100_000, '{"architectures": ' + "9" * 10_000 + "}", "\ud800"])
def test_odd_json_is_told(checkpoint: Path, content: str) -> None:
    (checkpoint / "config.json").write_text(content, errors="surrogatepass")
    with pytest.raises(OperationError, match=r"config\.json"):
        check_checkpoint(checkpoint)
