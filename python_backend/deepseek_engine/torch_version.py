"""Opens a version with `runner: torch`."""

from pathlib import Path

import torch
from piccard_contract.sampling import SamplingParams
from piccard_contract.version_file import CacheDtype, Precision, VersionFile, VersionFileError

from deepseek_engine.engine import Engine
from deepseek_engine.memory_budget import cache_bytes, host_memory
from deepseek_engine.models import load_model
from deepseek_engine.profiles import profile
from deepseek_engine.pulse import Pulse
from deepseek_engine.request import EngineRequest
from deepseek_engine.runners.torch import TorchRunner
from deepseek_engine.text.tokenizer import Tokenizer
from deepseek_engine.version import OpenVersion, Progress

_DTYPES = {
    Precision.FLOAT32: torch.float32,
    Precision.BFLOAT16: torch.bfloat16,
    Precision.FLOAT16: torch.float16,
}
# The rest of the progress is the warm-up.
_LOADED = 0.95


def open_torch(file: VersionFile, *, checkpoint: Path, progress: Progress, threads: int | None = None) -> OpenVersion:
    """Load the checkpoint and run one short generation, so that the first request finds everything warm.

    Args:
        threads: threads to compute with on a CPU; None leaves it to torch.

    Raises:
        ValueError: device, memory, settings or checkpoint cannot be used; says what to change.
    """
    device = _device(file.device)
    dtype = _dtype(file, device)
    if threads is not None:
        torch.set_num_threads(threads)
    tokenizer = Tokenizer.from_folder(checkpoint)
    used = _allocated(device)
    model = load_model(
        checkpoint, dtype=dtype, device=str(device), progress=lambda done, total: progress(_LOADED * done / total)
    )
    on_gpu = device.type == "cuda"
    total = torch.cuda.get_device_properties(device).total_memory if on_gpu else host_memory()
    weights = _allocated(device) - used if on_gpu else _file_bytes(checkpoint)
    block = {} if file.cache.block is None else {"block_size": file.cache.block}
    settings = profile(
        file.profile.value,
        **block,
        cache_bytes=cache_bytes(file.memory, on_gpu=on_gpu, total=total, weights=weights),
        max_model_len=file.max_model_len,
    )
    pulse = Pulse()
    model.on_layer = pulse.beat
    runner = TorchRunner(model, settings, device)
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
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise VersionFileError(
            f"version.yaml: device {name} is not there; this machine has {torch.cuda.device_count()} GPUs that torch "
            "can use; publish with --device cpu or auto"
        )
    return device


def _dtype(file: VersionFile, device: torch.device) -> torch.dtype:
    precision = file.precision
    if precision is Precision.AUTO:
        precision = Precision.FLOAT32 if device.type == "cpu" else Precision.BFLOAT16
    if file.cache.dtype not in (CacheDtype.AUTO, CacheDtype(precision.value)):
        raise VersionFileError(
            f"version.yaml: cache.dtype {file.cache.dtype.value} differs from the precision {precision.value}; "
            "use auto: a cache of another type is not built yet"
        )
    return _DTYPES[precision]


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _file_bytes(checkpoint: Path) -> int:
    return sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))


def _warm_up(engine: Engine) -> None:
    """A prompt and a few tokens; raises where the model cannot even do that."""
    params = SamplingParams(max_tokens=min(4, engine.max_model_len - 1), temperature=0.0, ignore_eos=True)
    prompt = [0] * max(1, min(8, engine.max_model_len - 4))
    engine.add(EngineRequest("warm-up", prompt, params))
    while engine.has_work():
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(f"the model failed in its warm-up: {output.error.message}")
