"""Exported models against the engine's, family by family."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from deepseek_engine.models import CheckpointError, load_model
from deepseek_engine.runners.onnxruntime import OnnxModel
from deepseek_ops.build import sources_in
from deepseek_ops.exporter.export import HEAD_FILE, MODEL_FILE, MOST_POSITIONS, ExportError, export
from deepseek_ops.exporter.weight_format import Int4Format
from int4_checkpoints import dequantized_checkpoint, exported_tensors
from paged_sequences import PagedSequences
from random_checkpoints import FAMILIES, VARIANTS, make_checkpoint, random_token_ids
from safetensors.torch import load_file, save_file
from torch import Tensor

TOLERANCE = 2e-4


def run(model: object) -> list[Tensor]:
    """Prompts of three sequences, one of them in two chunks beside a decoding one, then steps of one token."""
    sequences = PagedSequences(model, [90, 40, 60], poison=float("nan"))  # type: ignore[arg-type]
    tokens = [random_token_ids(length, seed) for seed, length in enumerate((90, 40, 60))]
    logits = []
    for chunks in (
        {0: tokens[0][:70], 1: tokens[1][:9]},
        {1: tokens[1][9:10], 2: tokens[2][:33]},
        {2: tokens[2][33:50], 0: tokens[0][70:71]},
        *(
            {0: tokens[0][71 + i : 72 + i], 1: tokens[1][10 + i : 11 + i], 2: tokens[2][50 + i : 51 + i]}
            for i in range(4)
        ),
    ):
        logits += list(sequences.step(chunks).values())
    return logits


@pytest.mark.parametrize("family", [*FAMILIES, *VARIANTS])
def test_logits_are_the_engines(
    library: Path, family: str, checkpoint_folder: Callable[[str], Path], export_folder: Callable[[str], Path]
) -> None:
    model = load_model(checkpoint_folder(family), dtype=torch.float32)
    for got, expected in zip(
        run(OnnxModel(export_folder(family), library, model.config, threads=1)), run(model), strict=True
    ):
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=TOLERANCE)
        assert torch.equal(got.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("name", [MODEL_FILE, HEAD_FILE])
def test_the_graphs_hold_nothing_but_our_operators(export_folder: Callable[[str], Path], name: str) -> None:
    graph = onnx.load(export_folder("v3") / name, load_external_data=False).graph
    others = {node.op_type for node in graph.node if node.domain != "com.deepseek"}
    assert others <= {"MatMul", "Gather", "Cast"}
    assert all(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in graph.initializer)


def test_files_are_named_by_their_part(export_folder: Callable[[str], Path]) -> None:
    assert sorted(path.name for path in export_folder("v3").iterdir()) == [
        "embedding.data",
        "head.data",
        HEAD_FILE,
        "layer_000.data",
        "layer_001.data",
        "layer_002.data",
        MODEL_FILE,
    ]


def test_weights_keep_their_type(library: Path, checkpoint_folder: Callable[[str], Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    halved = tmp_path / "halved"
    AutoModelForCausalLM.from_pretrained(checkpoint_folder("v3"), dtype=torch.bfloat16).save_pretrained(halved)
    made = export(halved, tmp_path / "out")
    graphs = [onnx.load(made / name, load_external_data=False).graph for name in (MODEL_FILE, HEAD_FILE)]
    kinds = {tensor.name: tensor.data_type for graph in graphs for tensor in graph.initializer}
    single = {name for name, kind in kinds.items() if kind == onnx.TensorProto.FLOAT}
    assert all(name == "rotations" or name.endswith("e_score_correction_bias") for name in single)
    assert set(kinds.values()) == {onnx.TensorProto.FLOAT, onnx.TensorProto.BFLOAT16}
    model = load_model(halved, dtype=torch.float32)
    for got, expected in zip(run(OnnxModel(made, library, model.config, threads=1)), run(model), strict=True):
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("family", ["v2", "v2_lite", "v3", "llama_bias", "qwen2"])
@pytest.mark.parametrize("group_size", [32, 24])
def test_int4_logits_are_the_engines_over_the_same_weights(
    library: Path, family: str, group_size: int, checkpoint_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = checkpoint_folder(family)
    made = export(folder, tmp_path / "out", format=Int4Format(group_size))
    model = load_model(dequantized_checkpoint(folder, made, tmp_path / "unpacked", group_size), dtype=torch.float32)
    for got, expected in zip(run(OnnxModel(made, library, model.config, threads=1)), run(model), strict=True):
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=TOLERANCE)
        assert torch.equal(got.argmax(-1), expected.argmax(-1))


def test_int4_packs_products_and_experts_and_nothing_else(
    checkpoint_folder: Callable[[str], Path], export_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    packed = exported_tensors(export(checkpoint_folder("v3"), tmp_path / "packed", format=Int4Format()))
    plain = exported_tensors(export_folder("v3"))
    kept = {"embed_tokens.weight", "lm_head.weight", "kv_b_proj.weight", "gate.weight", "rotations"}
    for name, tensor in plain.items():
        if tensor.dim() == 1 or any(name.endswith(each) for each in kept):
            assert torch.equal(packed[name], tensor), name
        else:
            assert packed[name].dtype == torch.uint8, name
            assert packed[name].shape[:-1] == tensor.shape[:-1]
            assert packed[f"{name}_scales"].dtype == tensor.dtype


def test_int4_refuses_what_it_cannot_hold(checkpoint_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(checkpoint_folder("v3"), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.experts.3.down_proj.weight"][5, 7] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"weight model\.layers\.1\.mlp\.experts\.down has infinities or NaN"):
        export(folder, tmp_path / "out", format=Int4Format())
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


def test_parts_are_told_in_order(checkpoint_folder: Callable[[str], Path], tmp_path: Path) -> None:
    told: list[str] = []
    export(checkpoint_folder("llama"), tmp_path / "out", told.append)
    assert told == ["embedding", "layer_000", "layer_001", "layer_002", "head"]


def test_two_exports_to_one_folder_do_not_mix(checkpoint_folder: Callable[[str], Path], tmp_path: Path) -> None:
    checkpoint, out = checkpoint_folder("v3"), tmp_path / "o[u]t"
    ended = subprocess.Popen(["true"])
    ended.wait()
    killed = tmp_path / f".{out.name}.{ended.pid}.part"
    killed.mkdir()

    def meanwhile(part: str) -> None:
        if part == "layer_001":
            command = [sys.executable, "-m", "piccard", "export", str(checkpoint), str(out), "--quantize=int4"]
            subprocess.run(command, check=True, capture_output=True)

    with pytest.raises(ExportError, match="is there already"):
        export(checkpoint, out, meanwhile)
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
    alone = exported_tensors(export(checkpoint, tmp_path / "alone", format=Int4Format()))
    both = exported_tensors(out)
    assert both.keys() == alone.keys()
    assert all(torch.equal(both[name], alone[name]) for name in alone)


@pytest.mark.parametrize("family", ["v3", "llama"])
def test_positions_that_the_operators_do_not_take_are_refused(
    family: str, checkpoint_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Before a table of them is made, and not by the session that would open the export."""
    assert f"kMaxInteger = int64_t{{1}} << {MOST_POSITIONS.bit_length() - 1};" in sources_in("shared")["spec.h"]
    folder = tmp_path / "long"
    shutil.copytree(checkpoint_folder(family), folder)
    config = json.loads((folder / "config.json").read_text())
    for positions in (MOST_POSITIONS + 1, 10**14):
        (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": positions}))
        with pytest.raises(ExportError, match=f"take up to {MOST_POSITIONS} positions, not {positions}; lower"):
            export(folder, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["long"]


def test_what_fails_leaves_nothing(checkpoint_folder: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="is there already"):
        export(checkpoint_folder("llama"), tmp_path)
    damaged = make_checkpoint("llama", tmp_path / "damaged")
    file = damaged / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(CheckpointError):
        export(damaged, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged"]
