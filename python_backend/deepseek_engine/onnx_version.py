"""Opens a version with `runner: onnxruntime`."""

from pathlib import Path

import onnxruntime
import torch
from piccard_contract.version_file import Precision, VersionFile, VersionFileError

from deepseek_engine.engine_version import LOADED, chosen_precision, engine_version, settings_of, warm_version
from deepseek_engine.gpu.fusions import capability_of, kernel_obstacle
from deepseek_engine.gpu_version import gpu_budget, gpu_runner
from deepseek_engine.memory_budget import file_bytes
from deepseek_engine.models import ModelConfig, load_config
from deepseek_engine.pulse import Pulse
from deepseek_engine.runners.onnxruntime import OnnxModel
from deepseek_engine.text.tokenizer import Tokenizer
from deepseek_engine.torch_version import DTYPES, device_of
from deepseek_engine.version import OpenVersion, Progress

PROVIDER = "CUDAExecutionProvider"


def open_onnxruntime(
    file: VersionFile, *, checkpoint: Path, home: Path, progress: Progress, threads: int
) -> OpenVersion:
    """Open the export of a checkpoint and run one short generation, so that the first request finds everything warm.

    Args:
        checkpoint: what was exported; its settings and tokenizer are read.
        home: what relative paths of version.yaml are relative to.
        threads: threads to compute with on a CPU.

    Raises:
        ValueError: export, library, device, memory or settings cannot be used; says what to change.
    """
    device = _device(file)
    # What samples runs in torch.
    torch.set_num_threads(threads)
    tokenizer, config = Tokenizer.from_folder(checkpoint), load_config(checkpoint)
    folder, library = _named(file.export, "export", home), _named(file.ops_library, "ops_library", home)
    weights = file_bytes(folder, "*.data")
    if device.type == "cuda":
        return _open_gpu(file, tokenizer, config, folder, library, device, weights, progress)
    model = OnnxModel(folder, library, config, threads=threads)
    progress(LOADED)
    pulse = Pulse()
    pulse.follow(model.computed)
    return engine_version(file, model, tokenizer, device=device, weights=weights, pulse=pulse)


def _open_gpu(
    file: VersionFile,
    tokenizer: Tokenizer,
    config: ModelConfig,
    folder: Path,
    library: Path,
    device: torch.device,
    weights: int,
    progress: Progress,
) -> OpenVersion:
    obstacle = kernel_obstacle(config, device, DTYPES[chosen_precision(file, device)], capability_of(device))
    if obstacle is not None:
        raise VersionFileError(f"version.yaml: {obstacle.reason}; publish with --runner torch or --device cpu")
    if file.batch_invariant:
        raise VersionFileError("version.yaml: batch_invariant is for --runner torch; publish without it")
    from deepseek_engine.gpu.onnx_decoder import load_onnx_decoder

    settings = settings_of(file, on_gpu=True)
    budget = gpu_budget(file, device, weights)
    model = load_onnx_decoder(folder, library, config, device=device, memory=budget)
    progress(LOADED)
    runner = gpu_runner(model, settings, budget)
    return warm_version(file, model, runner, tokenizer, settings, device=device, pulse=Pulse())


def _device(file: VersionFile) -> torch.device:
    """A CPU unless version.yaml says otherwise, since the export was made for one or the other."""
    if file.device.startswith("cuda") and PROVIDER not in onnxruntime.get_available_providers():
        raise VersionFileError(
            f"version.yaml: device {file.device} needs onnxruntime-gpu, and the onnxruntime that is installed"
            f" ({onnxruntime.__version__}) has no {PROVIDER}; install onnxruntime-gpu in its place, or publish with"
            " --device cpu or --runner torch"
        )
    device = torch.device("cpu") if file.device == "auto" else device_of(file.device)
    precision = chosen_precision(file, device)
    if device.type == "cpu" and precision is not Precision.FLOAT32:
        raise VersionFileError(
            f"version.yaml: runner onnxruntime computes in float32 on a CPU, not in {precision.value}; publish with"
            " --precision float32 or auto, or with --device cuda"
        )
    return device


def _named(path: str | None, key: str, home: Path) -> Path:
    if path is None or not (home / path).exists():
        there = "is missing" if path is None else f"{home / path} is not there"
        raise VersionFileError(f"version.yaml: {key} {there}; publish the version again")
    return home / path
