"""`piccard export`: the demo checkpoint in its own type and in four bits."""

from pathlib import Path

from piccard.cli import app
from piccard.errors import OperationError
from piccard.installation import demo_checkpoint
from typer.testing import CliRunner


def exported(out: Path, *options: str) -> dict[str, int]:
    """File name to bytes of an export."""
    result = CliRunner().invoke(app, ["export", str(demo_checkpoint()), str(out), *options])
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(out)
    assert result.stderr.splitlines()[0] == "embedding"
    return {path.name: path.stat().st_size for path in out.iterdir()}


def test_int4_is_a_fraction_of_the_checkpoints_type(tmp_path: Path) -> None:
    plain, packed = exported(tmp_path / "plain"), exported(tmp_path / "packed", "--quantize", "int4")
    assert plain.keys() == packed.keys()
    layers = [name for name in plain if name.startswith("layer_")]
    assert len(layers) == 6
    # Of 16 bits 4.75 are left of a packed weight, and kv_b, norms and gates are whole.
    assert sum(packed[name] for name in layers) < 0.37 * sum(plain[name] for name in layers)
    assert packed["embedding.data"] == plain["embedding.data"]
    assert packed["head.data"] == plain["head.data"]


def test_another_quantization_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["export", str(demo_checkpoint()), str(tmp_path / "out"), "--quantize", "int8"])
    assert result.exit_code == 2
    assert "'int8' is not one of 'int4'" in result.output
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_there_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["export", str(demo_checkpoint()), str(tmp_path), "--quantize", "int4"])
    assert isinstance(result.exception, OperationError)
    assert "is there already" in str(result.exception)


def test_for_a_gpu_the_gates_alone_are_larger(tmp_path: Path) -> None:
    plain, device = exported(tmp_path / "plain"), exported(tmp_path / "device", "--precision", "bfloat16")
    assert plain.keys() == device.keys()
    assert device["head.data"] == plain["head.data"]
    # The demo is bfloat16 on disk; gates are float32 for a GPU, and tensors begin at whole pages.
    layers = [name for name in plain if name.startswith("layer_")]
    assert all(plain[name] < 1.1 * device[name] and device[name] < 1.1 * plain[name] for name in layers)


def test_packed_weights_for_a_gpu(tmp_path: Path) -> None:
    options = ["--precision", "bfloat16", "--quantize", "int4"]
    plain, packed = exported(tmp_path / "plain", *options[:2]), exported(tmp_path / "packed", *options)
    layers = [name for name in plain if name.startswith("layer_")]
    # kv_b and the gates stay as they are, and the demo's narrow experts are padded.
    assert all(packed[name] < 0.6 * plain[name] for name in layers)
