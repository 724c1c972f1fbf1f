"""The processes that measure: one makes the weights, one serves interactively, one in bulk, one runs transformers."""

import statistics
import time
import traceback
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from deepseek_engine.failures import breaks_the_device
from deepseek_engine.kernels.dispatch import DISPATCH
from deepseek_engine.profiles import profile
from deepseek_engine.settings import EngineSettings

from whole_engine import two_runners as two
from whole_engine.checkpoint import SHAPES, ensure
from whole_engine.engine import Prompts, Streams, build_engine, timed
from whole_engine.results import Log, Row
from whole_engine.sections import SECTIONS, SMOKE, Bench, Sizes, copy_rate, floor_rate
from whole_engine.watching import Captures, Compilations

START_TARGET = 40.0


@dataclass(frozen=True)
class Work:
    """What a process is to do.

    Attributes:
        started: `time.time` when the process was started, and when it began to import.
        deadline: `time.time` after which no further case is begun.
        export, ops_library: of runner onnxruntime.
    """

    sections: list[str]
    folder: Path
    log: Log
    device: torch.device
    memory: float | str | None
    shape: str
    layers: int | None
    seed: int
    smoke: bool
    started: tuple[float, float]
    deadline: float | None
    export: Path | None = None
    ops_library: Path | None = None

    @property
    def sizes(self) -> Sizes:
        return SMOKE if self.smoke else Sizes()


def header(device: torch.device) -> dict[str, Any]:
    """Where this runs."""
    on_gpu = device.type == "cuda"
    return {
        "card": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "capability": torch.cuda.get_device_capability(device) if on_gpu else None,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "triton": version("triton"),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def make_weights(work: Work) -> None:
    begin = time.perf_counter()
    config = SHAPES[work.shape]() if work.layers is None else SHAPES[work.shape](work.layers)
    ensure(work.folder, config, seed=work.seed, device=work.device)
    size = sum(path.stat().st_size for path in work.folder.glob("*.safetensors"))
    seconds = time.perf_counter() - begin
    work.log.write(header={"weights": {"shape": work.shape, "bytes": size, "seed": work.seed, "config": config}})
    print(f"weights of {size / 1e9:.1f} GB made in {seconds:.1f} s", flush=True)


def serve(work: Work, group: str, settings: EngineSettings, *, batch_invariant: bool = False) -> None:
    """Build an engine and run the sections on it.

    Where "start" is one of them, the time from the process's start to the first token is a figure, and the rate of
    copies is measured after it. Compilations are those of this process; an engine that has others compile tells their
    time in `Built.seconds`.
    """
    imported, tell_start = time.time(), "start" in work.sections
    compilations, captures = Compilations(), Captures()
    compilations.watch()
    captures.watch()
    seconds: dict[str, float] = {}
    with timed(seconds, "device", work.device):
        torch.zeros(1, device=work.device)
    measured = 0.0 if tell_start else copy_rate(work.device, work.sizes.copy_bytes)
    built = build_engine(work.folder, work.device, settings, work.memory, batch_invariant=batch_invariant)
    prompts = Prompts(built.runner.vocab_size, seed=work.seed)
    with timed(seconds, "first token", work.device), Streams(built.engine) as streams:
        streams.add(prompts.draw(1, work.sizes.prompt), 1)
        streams.until(1)
        first = time.time()
    if tell_start:
        parts = {
            "interpreter": work.started[1] - work.started[0],
            "imports": imported - work.started[1],
            **seconds,
            **built.seconds,
            "of the runner: compiling, all threads together": compilations.seconds,
            "of the runner: capturing graphs": captures.seconds,
            "compilations": compilations.count,
            "captures": captures.count,
        }
        total = first - work.started[0]
        work.log.add(Row("start", "start to first token", total, "s", "less", START_TARGET, "98-133", details=parts))
        print("  " + ", ".join(f"{name} {value:.1f}" for name, value in parts.items()), flush=True)
        measured = copy_rate(work.device, work.sizes.copy_bytes)
    told = header(work.device)
    told |= {"copy_bytes_per_second": measured, "floor_bytes_per_second": floor_rate(measured, told["card"])}
    told[f"settings_{group}"] = asdict(built.settings)
    work.log.write(header=told)
    print(told, flush=True)
    bench = Bench(
        work.log,
        work.folder,
        work.device,
        work.sizes,
        built,
        prompts,
        told["floor_bytes_per_second"],
        work.deadline,
    )
    for name in work.sections:
        if name != "start":
            run_section(bench, name, compilations, captures)
    tell_dispatch(work.log, group)


def tell_dispatch(log: Log, group: str) -> None:
    """Keep which implementation served each operator, and print what fell back to its reference."""
    chosen = {name: choice.reason for name, choice in DISPATCH.choices.items()}
    fallbacks = [f"{name}, {cause}: {count} times" for (name, cause), count in DISPATCH.fallbacks.items()]
    log.write(header={f"dispatch_{group}": {"chosen": chosen, "fallbacks": fallbacks}})
    for fallback in fallbacks:
        print(f"fell back: {fallback}", flush=True)


def run_section(bench: Bench, name: str, compilations: Compilations, captures: Captures) -> None:
    """One section; what it breaks keeps the others from nothing, while the device still answers."""
    if not bench.may_begin(name):
        return
    bench.log.write(begin=name)
    print(f"-- {name}", flush=True)
    before, begin = (compilations.count, captures.count), time.perf_counter()
    preempted = bench.built.engine.stats().preemptions
    try:
        SECTIONS[name](bench)
    except Exception as error:
        bench.log.write(failed=name, why=f"{type(error).__name__}: {error}")
        traceback.print_exc()
        if breaks_the_device(error):
            raise
    seconds = time.perf_counter() - begin
    late = compilations.count - before[0] + captures.count - before[1]
    details = {
        "compilations": compilations.count - before[0],
        "captures": captures.count - before[1],
        "preemptions": bench.built.engine.stats().preemptions - preempted,
        "seconds": seconds,
    }
    bench.log.add(Row("warm", f"compiled or captured during {name}", late, "times", "less", 0.0, details=details))
    print(f"-- {name} took {seconds:.1f} s", flush=True)


def interactive(work: Work) -> None:
    """Start to first token, and streams that long prompts disturb, with the profile that a service has by default."""
    on_gpu = work.device.type == "cuda"
    settings = profile("balanced", on_gpu=on_gpu, enable_prefix_caching=False, max_model_len=work.sizes.max_model_len)
    serve(work, "interactive", settings)


def bulk(work: Work) -> None:
    """Everything else of the engine. A step takes as many prompt tokens as fit, whether others decode or not."""
    serve(work, "bulk", _bulk_settings(work))


def invariant(work: Work) -> None:
    """Decoding with fixed tiles and splits."""
    serve(work, "invariant", _bulk_settings(work), batch_invariant=work.device.type == "cuda")


def _bulk_settings(work: Work) -> EngineSettings:
    return profile(
        "throughput",
        on_gpu=work.device.type == "cuda",
        enable_prefix_caching=False,
        max_model_len=work.sizes.max_model_len,
        prefill_chunk=8192,
    )


def transformers_generate(work: Work) -> None:
    """Tokens a second of `generate`, greedy, on the same folder; experts as transformers itself would run them."""
    from transformers import AutoModelForCausalLM

    sizes = work.sizes
    work.log.write(begin="transformers")
    placed: dict[str, Any] = {"device_map": {"": str(work.device)}} if work.device.type == "cuda" else {}
    begin = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(work.folder, dtype=torch.bfloat16, **placed).eval()
    print(f"-- transformers loaded in {time.perf_counter() - begin:.1f} s", flush=True)
    experts = getattr(model.config, "_experts_implementation", None) or "default experts"
    prompts = Prompts(model.config.vocab_size, seed=1)
    for batch in sizes.generate_batches:
        times = []
        for _ in range(sizes.peer_turns + 1):
            if work.deadline is not None and time.time() >= work.deadline:
                break
            ids = torch.tensor(prompts.draw(batch, sizes.prompt), device=work.device)
            begin = time.perf_counter()
            with torch.inference_mode():
                output = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    min_new_tokens=sizes.peer_tokens,
                    max_new_tokens=sizes.peer_tokens,
                    do_sample=False,
                    use_cache=True,
                    pad_token_id=0,
                )
            # The tokens on the host are the end of the work.
            produced = len(output[0].tolist()) - sizes.prompt
            times.append(time.perf_counter() - begin)
            if produced != sizes.peer_tokens:
                raise RuntimeError(f"transformers generated {produced} tokens instead of {sizes.peer_tokens}")
        if len(times) < 2:
            work.log.write(skipped=f"transformers, batch {batch}", why="the time is used up")
            continue
        seconds = statistics.median(times[1:])
        rate = batch * sizes.peer_tokens / seconds
        ms = seconds * 1e3 / sizes.peer_tokens
        work.log.add(Row("transformers", f"batch {batch}, {experts}", rate, "tokens/s", "more", ms=ms))


def two_runners(work: Work) -> None:
    """Runner onnxruntime beside runner torch."""
    work.log.write(begin=two.SECTION)
    sizes = work.sizes
    pair = two.Pair(
        folder=work.folder,
        export=work.export or work.folder.with_name(f"{work.folder.name}-onnx"),
        library=work.ops_library,
        device=work.device,
        seed=work.seed,
    )

    def may_begin(case: str) -> bool:
        if work.deadline is None or time.time() < work.deadline:
            return True
        work.log.write(skipped=case, why="the time is used up")
        return False

    work.log.write(header=header(work.device))
    two.compare(
        pair,
        work.log,
        batches=sizes.runner_batches,
        prompt=sizes.prompt,
        prompts=sizes.runner_prompts,
        turns=sizes.turns,
        lead=sizes.lead,
        window=sizes.window,
        may_begin=may_begin,
    )


WORKERS = {
    "make": make_weights,
    "interactive": interactive,
    "bulk": bulk,
    "invariant": invariant,
    "transformers": transformers_generate,
    "runners": two_runners,
}
