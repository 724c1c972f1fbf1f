"""Opens a version on a GPU, with the device kernels and CUDA graphs."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from piccard_contract.version_file import VersionFile

from deepseek_engine.engine_version import LOADED, settings_of, warm_version
from deepseek_engine.memory_budget import DEFAULT_GPU_SHARE, MemoryBudgetError, file_bytes, memory_bytes
from deepseek_engine.models import load_config
from deepseek_engine.pulse import Pulse
from deepseek_engine.text.tokenizer import Tokenizer
from deepseek_engine.version import OpenVersion, Progress

if TYPE_CHECKING:
    from deepseek_engine.gpu.device_model import DeviceModel
    from deepseek_engine.runners.cuda import CudaRunner
    from deepseek_engine.settings import EngineSettings


def open_gpu(
    file: VersionFile,
    tokenizer: Tokenizer,
    *,
    checkpoint: Path,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
) -> OpenVersion:
    """Load the checkpoint, find the cache's size by running the largest steps, capture the graphs.

    Raises:
        ValueError: memory, settings or checkpoint cannot be used; says what to change.
    """
    from deepseek_engine.gpu.decoder import load_gpu_model

    settings = settings_of(file, on_gpu=True)
    config = load_config(checkpoint)
    budget = gpu_budget(file, device, file_bytes(checkpoint, "*.safetensors"))
    pulse = Pulse()
    model = load_gpu_model(
        checkpoint,
        config,
        dtype=dtype,
        device=str(device),
        positions=file.max_model_len,
        batch_invariant=file.batch_invariant,
        progress=lambda done, all_bytes: progress(LOADED * done / all_bytes),
    )
    model.on_layer = pulse.beat
    runner = gpu_runner(model, settings, budget)
    return warm_version(file, model, runner, tokenizer, settings, device=device, pulse=pulse)


def gpu_runner(model: "DeviceModel", settings: "EngineSettings", budget: int) -> "CudaRunner":
    """A runner whose every graph is captured, with the largest cache that `budget` bytes of the card allow.

    Raises:
        MemoryBudgetError: they do not hold the model, its steps and a cache.
    """
    from deepseek_engine.gpu.memory_profile import profile_memory
    from deepseek_engine.runners.cuda import CudaRunner

    profile = profile_memory(model, settings)
    free, _ = torch.cuda.mem_get_info(model.device)
    runner = CudaRunner(model, settings, profile.blocks(budget, free))
    runner.capture()
    return runner


def gpu_budget(file: VersionFile, device: torch.device, weights: int) -> int:
    """The bytes of the card that a version may use.

    Raises:
        MemoryBudgetError: its `weights` bytes do not fit; refused with figures, before anything is read and an
            allocation fails.
    """
    total = torch.cuda.get_device_properties(device).total_memory
    budget = memory_bytes(DEFAULT_GPU_SHARE if file.memory is None else file.memory, total)
    _check_weights(weights, budget, torch.cuda.mem_get_info(device)[0])
    return budget


def _check_weights(weights: int, budget: int, free: int) -> None:
    if weights > min(budget, free):
        raise MemoryBudgetError(
            f"version.yaml: the weights take {weights / 2**30:.2f} GiB, but memory allows {budget / 2**30:.2f} GiB and "
            f"the card has {free / 2**30:.2f} GiB left beside the versions that are loaded; raise memory, retire a "
            "version, or take a smaller checkpoint"
        )
