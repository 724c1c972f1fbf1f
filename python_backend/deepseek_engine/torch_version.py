"""Opens a version with `runner: torch`."""

import logging
from pathlib import Path

import torch
from piccard_contract.version_file import Precision, VersionFile, VersionFileError

from deepseek_engine.engine_version import LOADED, chosen_precision, engine_version
from deepseek_engine.gpu.fusions import capability_of, kernel_obstacle
from deepseek_engine.gpu_version import open_gpu
from deepseek_engine.memory_budget import file_bytes
from deepseek_engine.models import load_config, load_model
from deepseek_engine.pulse import Pulse
from deepseek_engine.text.tokenizer import Tokenizer
from deepseek_engine.version import OpenVersion, Progress

_log = logging.getLogger(__name__)

DTYPES = {
    Precision.FLOAT32: torch.float32,
    Precision.BFLOAT16: torch.bfloat16,
    Precision.FLOAT16: torch.float16,
}


def open_torch(file: VersionFile, *, checkpoint: Path, progress: Progress, threads: int | None = None) -> OpenVersion:
    """Load the checkpoint and run one short generation, so that the first request finds everything warm.

    Args:
        threads: threads to compute with on a CPU; None leaves it to torch.

    Raises:
        ValueError: device, memory, settings or checkpoint cannot be used; says what to change.
    """
    device = device_of(file.device)
    dtype = DTYPES[chosen_precision(file, device)]
    if threads is not None:
        torch.set_num_threads(threads)
    tokenizer = Tokenizer.from_folder(checkpoint)
    if device.type == "cuda":
        obstacle = kernel_obstacle(load_config(checkpoint), device, dtype, capability_of(device))
        if obstacle is None:
            return open_gpu(file, tokenizer, checkpoint=checkpoint, dtype=dtype, device=device, progress=progress)
        _log.warning("the model runs without the device kernels: %s", obstacle.reason)
    used = _allocated(device)
    model = load_model(
        checkpoint, dtype=dtype, device=str(device), progress=lambda done, total: progress(LOADED * done / total)
    )
    pulse = Pulse()
    model.on_layer = pulse.beat
    on_gpu = device.type == "cuda"
    return engine_version(
        file,
        model,
        tokenizer,
        device=device,
        weights=_allocated(device) - used if on_gpu else file_bytes(checkpoint, "*.safetensors"),
        pulse=pulse,
    )


def device_of(name: str) -> torch.device:
    """The device of version.yaml's name. Raises VersionFileError where there is none."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise VersionFileError(
            f"version.yaml: device {name} is not there; this machine has {torch.cuda.device_count()} GPUs that torch "
            "can use; publish with --device cpu or auto"
        )
    return device


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
