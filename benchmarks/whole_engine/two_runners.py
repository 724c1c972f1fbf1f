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

from whole_engine.engine import Built, Prompts, decode, load, timed
from whole_engine.results import Log, Row

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
    turns: int,
    lead: int,
    window: int,
    may_begin: Callable[[str], bool],
) -> None:
    """A decoding step of each, in turns; the figure is the ratio of their medians."""
    import onnxruntime

    providers = onnxruntime.get_available_providers()
    if pair.on_gpu and PROVIDER not in providers:
        log.write(skipped=SECTION, why=f"the onnxruntime that is installed has no {PROVIDER}")
        return
    # Prompts come in pieces that graphs hold: what is compared is decoding. The cache holds what runs, and no more: two
    # engines share the card.
    longest = prompt + 2 * (lead + window) + 64
    settings = profile(
        "throughput",
        on_gpu=pair.on_gpu,
        enable_prefix_caching=False,
        max_model_len=longest,
        max_num_seqs=max(batches),
        max_num_batched_tokens=512,
        prefill_chunk=512,
    )
    settings = replace(settings, num_blocks=max(batches) * (longest // settings.block_size + 2))
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
    prompts = Prompts(built["torch"].runner.vocab_size, seed=pair.seed)
    for batch in batches:
        if not may_begin(f"{SECTION}, batch {batch}"):
            continue
        steps: dict[str, list[float]] = {name: [] for name in built}
        for turn in range(turns + 1):
            drawn = prompts.draw(batch, prompt)
            for name, each in built.items():
                found = decode(each.engine, drawn, lead=lead, window=window, windows=1).steps
                # The first turn finds clocks and caches cold.
                steps[name] += found if turn else []
        log.add(_row(batch, steps))
    for name, each in built.items():
        graphs = getattr(each.runner, "graphs", None)
        if graphs is not None:
            log.write(header={f"graphs_{name}": {"captures": graphs.captures, "ungraphed": dict(graphs.ungraphed)}})


def _row(batch: int, steps: dict[str, list[float]]) -> Row:
    middle = {name: statistics.median(each) for name, each in steps.items()}
    return Row(
        SECTION,
        f"decode, batch {batch}, over runner torch",
        middle[SECTION] / middle["torch"],
        "x",
        "less",
        TARGETS.get(batch, TARGET),
        ms=middle[SECTION] * 1e3,
        tokens_per_second=batch / middle[SECTION],
        details={
            "torch_ms": middle["torch"] * 1e3,
            "steps_ms": {name: [step * 1e3 for step in each] for name, each in steps.items()},
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
