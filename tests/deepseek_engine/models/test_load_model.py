"""Loading checkpoints as they lie on disk, whole and damaged."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from deepseek_engine.models import CheckpointError, load_model
from deepseek_engine.models.weights import INDEX_FILE, SINGLE_FILE, Checkpoint
from paged_sequences import chunked_logits
from random_checkpoints import make_checkpoint, random_token_ids
from safetensors.torch import load_file, save_file

TOKENS = random_token_ids(20, seed=1)
Folder = Callable[[str], Path]


@pytest.fixture
def folder(checkpoint_folder: Folder, tmp_path: Path) -> Path:
    """A copy of the V3 checkpoint that a test may change."""
    return Path(shutil.copytree(checkpoint_folder("v3"), tmp_path / "v3"))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / SINGLE_FILE)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / SINGLE_FILE)


def logits(folder: Path) -> torch.Tensor:
    return chunked_logits(load_model(folder, dtype=torch.float32), TOKENS, 20)


def test_shards_equal_one_file(folder: Path, tmp_path: Path) -> None:
    sharded = make_checkpoint("v3", tmp_path / "sharded", max_shard_size="200KB")
    assert not (sharded / SINGLE_FILE).exists()
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert torch.equal(logits(sharded), logits(folder))


def test_old_spelling_of_rope(folder: Path) -> None:
    before = logits(folder)
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    (folder / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits(folder), before)


def test_mtp_tensors_are_left_alone(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = logits(folder)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        names = [name for name in tensors if "layers.2." in name]
        tensors.update({name.replace("layers.2.", "layers.3."): tensors[name].clone() for name in names})
        tensors["model.layers.3.eh_proj.weight"] = torch.zeros(64, 128)

    change_weights(folder, add)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(logits(folder), before)
    assert not caplog.records


def test_unused_tensors_are_named_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    change_weights(folder, lambda tensors: tensors.update({"model.layers.1.self_attn.sinks": torch.zeros(4)}))
    with caplog.at_level(logging.WARNING):
        load_model(folder, dtype=torch.float32)
    assert [record.message for record in caplog.records] == [
        f"{folder}: 1 tensors are not used, such as model.layers.1.self_attn.sinks"
    ]


def test_norm_topk_prob_is_followed_for_v2(checkpoint_folder: Folder, tmp_path: Path) -> None:
    """transformers ignores the key for V2, where DeepSeek's own code normalises."""
    changed = Path(shutil.copytree(checkpoint_folder("v2"), tmp_path / "v2"))
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps({**config, "norm_topk_prob": True}))
    model = load_model(changed, dtype=torch.float32)
    weights, _ = model.layers[1].mlp.route(torch.randn(5, 64))
    torch.testing.assert_close(weights.sum(-1), torch.full((5,), 4.0))


def test_progress_counts_bytes_to_the_end(folder: Path) -> None:
    calls: list[tuple[int, int]] = []
    load_model(folder, dtype=torch.float32, progress=lambda done, total: calls.append((done, total)))
    size = (folder / SINGLE_FILE).stat().st_size
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert {total for _, total in calls} == {size}
    assert calls[-1] == (size, size)
    assert calls[-2][0] > 0.9 * size


def test_tensors_are_the_mapped_file(folder: Path) -> None:
    checkpoint = Checkpoint(folder, dtype=torch.float32)
    address = checkpoint.tensor("lm_head.weight", 320, 64).data_ptr()
    ranges = [
        [int(end, 16) for end in line.split()[0].split("-")]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if str(folder / SINGLE_FILE) in line
    ]
    assert any(start <= address < stop for start, stop in ranges)


def test_router_and_bias_stay_float32(folder: Path) -> None:
    mlp = load_model(folder, dtype=torch.bfloat16).layers[1].mlp
    assert (mlp.gate.dtype, mlp.bias.dtype, mlp.down.dtype) == (torch.float32, torch.float32, torch.bfloat16)


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(folder, dtype=torch.float32)
    return str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.1.mlp.experts.7.up_proj.weight",
        "model.layers.2.mlp.gate.e_score_correction_bias",
        "model.layers.2.self_attn.q_a_layernorm.weight",
        "lm_head.weight",
    ],
)
def test_missing_tensor(folder: Path, name: str) -> None:
    change_weights(folder, lambda tensors: tensors.pop(name))
    message = refused(folder)
    assert name in message
    assert "missing" in message


def test_misshapen_tensor(folder: Path) -> None:
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    change_weights(folder, lambda tensors: tensors.update({name: tensors[name][:-1]}))
    message = refused(folder)
    assert name in message
    assert "[159, 32]" in message
    assert "[160, 32]" in message


def test_tensor_of_another_type(folder: Path) -> None:
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    change_weights(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
    message = refused(folder)
    assert name in message
    assert "F8_E4M3" in message
    assert "BF16" in message


@pytest.mark.parametrize("kept", [0, 5, 1000, -10])
def test_truncated_file(folder: Path, kept: int) -> None:
    data = (folder / SINGLE_FILE).read_bytes()
    (folder / SINGLE_FILE).write_bytes(data[:kept])
    message = refused(folder)
    assert SINGLE_FILE in message
    assert "truncated" in message


def test_no_weights(folder: Path) -> None:
    (folder / SINGLE_FILE).unlink()
    assert f"{folder / SINGLE_FILE} is missing" in refused(folder)


def test_weights_in_another_format(folder: Path) -> None:
    (folder / SINGLE_FILE).rename(folder / "pytorch_model.bin")
    assert "save the model as safetensors" in refused(folder)


def test_missing_shard(tmp_path: Path) -> None:
    folder = make_checkpoint("v3", tmp_path, max_shard_size="200KB")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    message = refused(folder)
    assert str(shard) in message
    assert INDEX_FILE in message


def test_shard_without_its_tensor(tmp_path: Path) -> None:
    folder = make_checkpoint("v3", tmp_path, max_shard_size="200KB")
    places = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    shard = folder / places["model.norm.weight"]
    tensors = load_file(shard)
    tensors.pop("model.norm.weight")
    save_file({**tensors, "other": torch.zeros(1)}, shard)
    message = refused(folder)
    assert "model.norm.weight" in message
    assert str(shard) in message


@pytest.mark.parametrize("index", ["{}", "[]", "{", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'])
def test_bad_index(folder: Path, index: str) -> None:
    (folder / INDEX_FILE).write_text(index)
    assert INDEX_FILE in refused(folder)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "sub/model.safetensors"])
def test_an_index_stays_in_its_folder(folder: Path, name: str) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    assert name in refused(folder)
