"""Runner onnxruntime beside runner torch: both in one process on the same weights, in turns."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from deepseek_engine.engine import Engine
from deepseek_engine.models import load_config
from deepseek_engine.profiles import profile
from deepseek_engine.runners.torch import TorchRunner
from deepseek_engine.settings import EngineSettings
from deepseek_engine.text.tokenizer import Tokenizer
from torch.profiler import ProfilerActivity

from whole_engine import gpu_trace
from whole_engine.engine import Built, Prompts, decode, first_tokens, load, timed
from whole_engine.results import Log, Row
from whole_engine.sections import KEPT_KERNELS, traced

SECTION = "onnxruntime"
PROVIDER = "CUDAExecutionProvider"
# Over the step of runner torch, by batch; larger ones as 8.
TARGETS = {1: 1.2}
TARGET = 1.1
ARENA = 16 << 30
"""Bytes that a session may take beside its weights."""


@dataclass(frozen=True)
class Pair:
    """What is compared.

    Attributes:
        export: folder of the export; made where it is not there.
        library: the com.deepseek operators; None has them built.
    """

    folder: Path
    export: Path
    library: Path | None
    device: torch.device
    seed: int

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


def compare(
    pair: Pair,
    log: Log,
    *,
    batches: tuple[int, ...],
    prompt: int,
    prompts: tuple[int, ...],
    turns: int,
    lead: int,
    window: int,
    may_begin: Callable[[str], bool],
) -> None:
    """A decoding step of each, and the time to the first token of one prompt, in turns; figures are ratios of medians.

    Args:
        batches, prompt: of decoding, and the tokens of its prompts.
        prompts: tokens of each prompt that is timed alone; all of it is one step.
    """
    import onnxruntime

    providers = onnxruntime.get_available_providers()
    if pair.on_gpu and PROVIDER not in providers:
        log.write(skipped=SECTION, why=f"the onnxruntime that is installed has no {PROVIDER}")
        return
    # The cache holds what runs, and no more: two engines share the card.
    longest = prompt + 2 * (lead + window) + 64
    chunk = max(512, *prompts)
    settings = profile(
        "throughput",
        on_gpu=pair.on_gpu,
        enable_prefix_caching=False,
        max_model_len=max(longest, *prompts) + 1,
        max_num_seqs=max(batches),
        max_num_batched_tokens=chunk,
        prefill_chunk=chunk,
    )
    blocks = max(batches) * (longest // settings.block_size + 2) + chunk // settings.block_size + 2
    settings = replace(settings, num_blocks=blocks)
    seconds: dict[str, float] = {}
    with timed(seconds, "export", pair.device):
        _export(pair)
    models = {"torch": lambda: load(pair.folder, pair.device), SECTION: lambda: _load(pair)}
    built = {}
    for name, load_model in models.items():
        with timed(seconds, f"{name}, weights", pair.device):
            model = load_model()
        with timed(seconds, f"{name}, runner", pair.device):
            built[name] = _built(pair, model, settings)
    log.write(header={"runners": {"onnxruntime": onnxruntime.__version__, "seconds": seconds}})
    print(", ".join(f"{name} {value:.1f} s" for name, value in seconds.items()), flush=True)
    drawn = Prompts(built["torch"].runner.vocab_size, seed=pair.seed)
    for batch in batches:
        if may_begin(f"{SECTION}, batch {batch}"):
            log.add(_decoding(built, drawn, batch, prompt, turns=turns, lead=lead, window=window))
    for length in prompts:
        if may_begin(f"{SECTION}, prompt of {length}"):
            log.add(_prompt(built, drawn, length, pair.device, turns=turns))
    for name, each in built.items():
        graphs = getattr(each.runner, "graphs", None)
        if graphs is not None:
            log.write(header={f"graphs_{name}": {"captures": graphs.captures, "ungraphed": dict(graphs.ungraphed)}})


def _decoding(
    built: dict[str, Built], prompts: Prompts, batch: int, length: int, *, turns: int, lead: int, window: int
) -> Row:
    steps: dict[str, list[float]] = {name: [] for name in built}
    for turn in range(turns + 1):
        drawn = prompts.draw(batch, length)
        for name, each in built.items():
            found = decode(each.engine, drawn, lead=lead, window=window, windows=1).steps
            # The first turn finds clocks and caches cold.
            steps[name] += found if turn else []
    row = _row(f"decode, batch {batch}, over runner torch", "steps_ms", steps, TARGETS.get(batch, TARGET))
    row.tokens_per_second = batch / statistics.median(steps[SECTION])
    return row


def _prompt(built: dict[str, Built], prompts: Prompts, length: int, device: torch.device, *, turns: int) -> Row:
    times: dict[str, list[float]] = {name: [] for name in built}
    for turn in range(turns + 1):
        drawn = prompts.draw(1, length)
        for name, each in built.items():
            found = first_tokens(each.engine, drawn, device)
            times[name] += [found] if turn else []
    row = _row(f"first token, {length}-token prompt, over runner torch", "times_ms", times)
    row.tokens_per_second = length / statistics.median(times[SECTION])
    drawn = prompts.draw(1, length)
    row.details["kernels"] = {name: _kernels(each, drawn, device) for name, each in built.items()}
    return row


def _kernels(built: Built, prompts: list[list[int]], device: torch.device) -> list[tuple[str, float, float]]:
    """What ran on the GPU for the prompts: name, microseconds and launches, the longest first; nothing on a CPU."""
    if device.type != "cuda":
        return []
    activities = [ProfilerActivity.CUDA]
    events = traced(lambda: first_tokens(built.engine, prompts, device), 1, device, activities)
    found = gpu_trace.kernel_times(events, 1)[:KEPT_KERNELS]
    return [(each.name, round(each.us, 1), each.launches) for each in found]


def _row(case: str, kept: str, seconds: dict[str, list[float]], target: float | None = None) -> Row:
    middle = {name: statistics.median(each) for name, each in seconds.items()}
    return Row(
        SECTION,
        case,
        middle[SECTION] / middle["torch"],
        "x",
        "less",
        target,
        ms=middle[SECTION] * 1e3,
        details={
            "torch_ms": middle["torch"] * 1e3,
            kept: {name: [each * 1e3 for each in times] for name, times in seconds.items()},
        },
    )


def _export(pair: Pair) -> None:
    if pair.export.exists():
        return
    from deepseek_ops.exporter.export import export

    export(pair.folder, pair.export, precision=torch.bfloat16 if pair.on_gpu else torch.float32)


def _load(pair: Pair) -> Any:
    """The model over the export."""
    library = pair.library or _library(on_gpu=pair.on_gpu)
    config = load_config(pair.folder)
    if pair.on_gpu:
        from deepseek_engine.gpu.onnx_decoder import load_onnx_decoder

        return load_onnx_decoder(pair.export, library, config, device=pair.device, memory=ARENA)
    from deepseek_engine.runners.onnxruntime import OnnxModel

    return OnnxModel(pair.export, library, config, threads=1)


def _built(pair: Pair, model: Any, settings: EngineSettings) -> Built:
    """The engine over a model, warm."""
    runner: Any
    if pair.on_gpu:
        from deepseek_engine.runners.cuda import CudaRunner

        runner = CudaRunner(model, settings)
        runner.precompile()
        runner.capture()
    else:
        runner = TorchRunner(model, settings, pair.device)
    return Built(Engine(runner, Tokenizer.from_folder(pair.folder), settings), runner, model, settings)


def _library(*, on_gpu: bool) -> Path:
    if on_gpu:
        from deepseek_ops.cuda.build import build_cuda

        return build_cuda()
    from deepseek_ops.build import build

    return build()
