"""A checkpoint's folder in, a folder with model.onnx, head.onnx and their weights out."""

import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import torch
from deepseek_engine.models import load_config
from deepseek_engine.models.weights import DTYPES, Checkpoint
from safetensors import safe_open

from deepseek_ops.exporter.model_writer import ModelWriter
from deepseek_ops.exporter.weight_files import WeightFiles
from deepseek_ops.exporter.weight_format import PlainFormat, WeightFormat
from deepseek_ops.schemas import register_schemas

MODEL_FILE = "model.onnx"
HEAD_FILE = "head.onnx"


class ExportError(RuntimeError):
    """Why nothing was written; the message says what to do."""


def export(
    checkpoint: Path,
    out: Path,
    progress: Callable[[str], None] | None = None,
    *,
    format: WeightFormat | None = None,
) -> Path:
    """Write the model; returns its folder. The graphs pass onnx.checker.

    Weights keep the checkpoint's own type, or those of products and experts have `format`. `progress` is called with
    the name of each part that is begun. What fails leaves no folder behind.

    Raises:
        CheckpointError: the checkpoint is none that the engine loads, or `format` does not hold its weights.
        ExportError: `out` is there already.
    """
    if out.exists():
        raise ExportError(f"{out} is there already: name a folder that is not, or remove it")
    config = load_config(checkpoint)
    # Opening it first tells what is wrong with its files.
    weights = Checkpoint(checkpoint, dtype=torch.float32)
    weights.dtype = stored_dtype(checkpoint)
    work = out.with_name(f".{out.name}.part")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        graphs = ModelWriter(config, weights, WeightFiles(work, progress), format or PlainFormat()).write()
        register_schemas()
        for name, graph in zip((MODEL_FILE, HEAD_FILE), graphs, strict=True):
            path = work / name
            path.write_bytes(graph.SerializeToString())
            # From its path: so the checker finds the files too, and a model may be larger than one message.
            onnx.checker.check_model(str(path), full_check=True)
        work.rename(out)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return out


def stored_dtype(checkpoint: Path) -> torch.dtype:
    """The type of the embedding's table, which stands for the others."""
    name = "model.embed_tokens.weight"
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            if name in handle.keys():  # noqa: SIM118
                return DTYPES.get(handle.get_slice(name).get_dtype(), torch.float32)
    return torch.float32
