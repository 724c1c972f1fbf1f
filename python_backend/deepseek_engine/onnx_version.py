"""Opens a version with `runner: onnxruntime`."""

from pathlib import Path

import torch
from piccard_contract.version_file import Precision, VersionFile, VersionFileError

from deepseek_engine.engine_version import LOADED, chosen_precision, engine_version
from deepseek_engine.memory_budget import file_bytes
from deepseek_engine.models import load_config
from deepseek_engine.pulse import Pulse
from deepseek_engine.runners.onnxruntime import OnnxModel
from deepseek_engine.text.tokenizer import Tokenizer
from deepseek_engine.version import OpenVersion, Progress


def open_onnxruntime(
    file: VersionFile, *, checkpoint: Path, home: Path, progress: Progress, threads: int
) -> OpenVersion:
    """Open the export of a checkpoint and run one short generation, so that the first request finds everything warm.

    Args:
        checkpoint: what was exported; its settings and tokenizer are read.
        home: what relative paths of version.yaml are relative to.
        threads: threads to compute with.

    Raises:
        ValueError: export, library, device, memory or settings cannot be used; says what to change.
    """
    device = _device(file)
    # What samples runs in torch.
    torch.set_num_threads(threads)
    tokenizer = Tokenizer.from_folder(checkpoint)
    folder, library = _named(file.export, "export", home), _named(file.ops_library, "ops_library", home)
    model = OnnxModel(folder, library, load_config(checkpoint), threads=threads)
    progress(LOADED)
    pulse = Pulse()
    pulse.follow(model.computed)
    weights = file_bytes(folder, "*.data")
    return engine_version(file, model, tokenizer, device=device, weights=weights, pulse=pulse)


def _device(file: VersionFile) -> torch.device:
    if file.device not in ("auto", "cpu"):
        raise VersionFileError(
            f"version.yaml: the operators run on a CPU, not on device {file.device}; publish with --device cpu, or with"
            " --runner torch"
        )
    device = torch.device("cpu")
    if (precision := chosen_precision(file, device)) is not Precision.FLOAT32:
        raise VersionFileError(
            f"version.yaml: runner onnxruntime computes in float32, not in {precision.value}; publish with --precision"
            " float32 or auto"
        )
    return device


def _named(path: str | None, key: str, home: Path) -> Path:
    if path is None or not (home / path).exists():
        there = "is missing" if path is None else f"{home / path} is not there"
        raise VersionFileError(f"version.yaml: {key} {there}; publish the version again")
    return home / path
