"""From a loaded model to a version that is ready: sizes of the cache, the engine, and a warm-up."""

from typing import TYPE_CHECKING, Any

import torch
from piccard_contract.sampling import SamplingParams
from piccard_contract.version_file import CacheDtype, Precision, VersionFile, VersionFileError

from deepseek_engine.engine import Engine
from deepseek_engine.memory_budget import cache_bytes, host_memory
from deepseek_engine.models import Model
from deepseek_engine.operator_tables import watch_operators
from deepseek_engine.profiles import profile
from deepseek_engine.pulse import Pulse
from deepseek_engine.request import EngineRequest
from deepseek_engine.runners.base import ModelRunner
from deepseek_engine.runners.torch import TorchRunner
from deepseek_engine.settings import EngineSettings
from deepseek_engine.text.tokenizer import Tokenizer
from deepseek_engine.version import OpenVersion

if TYPE_CHECKING:
    from deepseek_engine.gpu.device_model import DeviceModel

LOADED = 0.95
"""Share of a version's progress at which its model is loaded; the rest is the warm-up."""


def engine_version(
    file: VersionFile, model: Model, tokenizer: Tokenizer, *, device: torch.device, weights: int, pulse: Pulse
) -> OpenVersion:
    """The version around a model, after one short generation, so that the first request finds everything warm.

    Args:
        device: where the model is.
        weights: bytes that its weights take of the device's memory.
        pulse: shows that the model gets on within a step.

    Raises:
        ValueError: memory or settings cannot be used; says what to change.
    """
    on_gpu = device.type == "cuda"
    total = torch.cuda.get_device_properties(device).total_memory if on_gpu else host_memory()
    cache = cache_bytes(file.memory, on_gpu=on_gpu, total=total, weights=weights)
    settings = settings_of(file, on_gpu=on_gpu, cache_bytes=cache)
    runner = TorchRunner(model, settings, device)
    return warm_version(file, model, runner, tokenizer, settings, device=device, pulse=pulse)


def settings_of(file: VersionFile, *, on_gpu: bool, **changes: Any) -> EngineSettings:
    """The settings that version.yaml names. Raises ValueError where they contradict each other."""
    if file.cache.block is not None:
        changes["block_size"] = file.cache.block
    return profile(file.profile.value, on_gpu=on_gpu, max_model_len=file.max_model_len, **changes)


def warm_version(
    file: VersionFile,
    model: "Model | DeviceModel",
    runner: ModelRunner,
    tokenizer: Tokenizer,
    settings: EngineSettings,
    *,
    device: torch.device,
    pulse: Pulse,
) -> OpenVersion:
    """The version around a runner, after one short generation. Raises where the model cannot even do that."""
    engine = Engine(runner, tokenizer, settings)
    _warm_up(engine)
    return OpenVersion(
        file=file,
        backend=engine,
        tokenizer=tokenizer,
        vocab_size=runner.vocab_size,
        max_model_len=engine.max_model_len,
        device=str(device),
        pulse=pulse,
        operators=watch_operators(
            model.config,
            runner,
            device=device,
            dtype=model.cache_spec().planes[0].dtype,
            exported=getattr(model, "exported", None),
        ),
    )


def chosen_precision(file: VersionFile, device: torch.device) -> Precision:
    """Of weights and activations on a device. Raises VersionFileError where the cache is to have another type."""
    precision = file.precision
    if precision is Precision.AUTO:
        precision = Precision.FLOAT32 if device.type == "cpu" else Precision.BFLOAT16
    if file.cache.dtype not in (CacheDtype.AUTO, CacheDtype(precision.value)):
        raise VersionFileError(
            f"version.yaml: cache.dtype {file.cache.dtype.value} differs from the precision {precision.value}; "
            "use auto: a cache of another type is not built yet"
        )
    return precision


def _warm_up(engine: Engine) -> None:
    """A prompt and a few tokens; raises where the model cannot even do that."""
    params = SamplingParams(max_tokens=min(4, engine.max_model_len - 1), temperature=0.0, ignore_eos=True)
    prompt = [0] * max(1, min(8, engine.max_model_len - 4))
    engine.add(EngineRequest("warm-up", prompt, params))
    while engine.has_work():
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(f"the model failed in its warm-up: {output.error.message}")
