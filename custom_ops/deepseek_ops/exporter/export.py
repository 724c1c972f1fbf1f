"""A checkpoint's folder in, a folder with model.onnx, head.onnx and their weights out."""

import glob
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import torch
from deepseek_engine.models import load_config
from deepseek_engine.models.config import DeepseekConfig, LlamaConfig, ModelConfig
from deepseek_engine.models.weights import DTYPES, Checkpoint
from safetensors import safe_open

from deepseek_ops.exporter.device_writer import BLOCK_COLUMNS, DeviceWriter
from deepseek_ops.exporter.model_writer import ModelWriter
from deepseek_ops.exporter.weight_files import WeightFiles
from deepseek_ops.exporter.weight_format import PlainFormat, WeightFormat
from deepseek_ops.schemas import register_schemas

MODEL_FILE = "model.onnx"
HEAD_FILE = "head.onnx"
HEAD_WIDTHS = range(16, 129, 16)
"""Of grouped heads on a GPU."""
MOST_POSITIONS = 1 << 24
"""Of a sequence, in the operators: kMaxInteger in csrc/shared/spec.h."""


class ExportError(RuntimeError):
    """Why nothing was written; the message says what to do."""


def export(
    checkpoint: Path,
    out: Path,
    progress: Callable[[str], None] | None = None,
    *,
    format: WeightFormat | None = None,
    precision: torch.dtype = torch.float32,
) -> Path:
    """Write the model; returns its folder. The graphs pass onnx.checker.

    `progress` is called with the name of each part that is begun. What fails leaves no folder behind.

    Args:
        format: of the weights of products and experts; else weights keep the checkpoint's own type.
        precision: of activations and cache: float32 for operators on a CPU; bfloat16 or float16 for those on a GPU,
            whose weights have it too.

    Raises:
        CheckpointError: the checkpoint is none that the engine loads, or `format` does not hold its weights.
        ExportError: `out` is there already, or no operator takes the model's positions, or on a GPU the model or the
            format.
    """
    _check_is_free(out)
    config = load_config(checkpoint)
    if config.max_position_embeddings > MOST_POSITIONS:
        raise ExportError(
            f"{checkpoint / 'config.json'}: the operators take up to {MOST_POSITIONS} positions, not"
            f" {config.max_position_embeddings}; lower max_position_embeddings or the factor of rope_scaling"
        )
    on_gpu = precision != torch.float32
    if on_gpu:
        _check_device_form(config, format)
    # Opening it first tells what is wrong with its files.
    weights = Checkpoint(checkpoint, dtype=torch.float32)
    weights.dtype = precision if on_gpu else stored_dtype(checkpoint)
    _remove_unfinished(out)
    work = _work_folder(out, os.getpid())
    work.mkdir(parents=True)
    try:
        writer = DeviceWriter if on_gpu else ModelWriter
        graphs = writer(config, weights, WeightFiles(work, progress), format or PlainFormat()).write()
        register_schemas()
        for name, graph in zip((MODEL_FILE, HEAD_FILE), graphs, strict=True):
            path = work / name
            path.write_bytes(graph.SerializeToString())
            # From its path: so the checker finds the files too, and a model may be larger than one message.
            onnx.checker.check_model(str(path), full_check=True)
        # Another process may have been sooner.
        _check_is_free(out)
        work.rename(out)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return out


def _check_is_free(out: Path) -> None:
    if out.exists():
        raise ExportError(f"{out} is there already: name a folder that is not, or remove it")


def _work_folder(out: Path, process: int | str) -> Path:
    """A process's own: two that write to one folder would mix their files."""
    return out.with_name(f".{out.name}.{process}.part")


def _remove_unfinished(out: Path) -> None:
    """What exports of processes that were killed left."""
    pattern = _work_folder(Path(glob.escape(str(out))), "*")
    for left in glob.glob(str(pattern)):
        process = left.removesuffix(".part").rpartition(".")[2]
        if process == str(os.getpid()) or (process.isdigit() and not Path("/proc", process).exists()):
            shutil.rmtree(left, ignore_errors=True)


def _check_device_form(config: ModelConfig, format: WeightFormat | None) -> None:
    if format is not None and isinstance(config, DeepseekConfig) and config.hidden_size % BLOCK_COLUMNS:
        raise ExportError(
            f"on a GPU packed experts have multiples of {BLOCK_COLUMNS} columns, not {config.hidden_size}; leave out"
            " --quantize, or export it in float32 for a CPU"
        )
    if isinstance(config, LlamaConfig) and config.head_dim not in HEAD_WIDTHS:
        raise ExportError(
            f"on a GPU the operators take heads of {HEAD_WIDTHS[0]} to {HEAD_WIDTHS[-1]} elements in steps of"
            f" {HEAD_WIDTHS.step}, not of {config.head_dim}; export it in float32 for a CPU, or serve it with"
            " --runner torch"
        )


def stored_dtype(checkpoint: Path) -> torch.dtype:
    """The type of the embedding's table, which stands for the others."""
    name = "model.embed_tokens.weight"
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            if name in handle.keys():  # noqa: SIM118
                return DTYPES.get(handle.get_slice(name).get_dtype(), torch.float32)
    return torch.float32
