"""What is measured: each section writes its figures as soon as it has them."""

import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from deepseek_engine.models.config import DeepseekConfig
from torch.profiler import ProfilerActivity, profile, record_function

from whole_engine import gpu_trace
from whole_engine.engine import Built, Decoding, Prompts, Streams, decode, first_tokens, synchronize, watched_experts
from whole_engine.floor import Routing, expected_touched, step_bytes
from whole_engine.results import Log, Row

# What the card reaches at least, as a copy of 4 GiB counts it, read plus write; a slow run is no lower floor.
LEAST_COPY_RATE = {"NVIDIA H200": 4200e9}
FILTERED = {"top_p": 0.95, "top_k": 50}

# By batch, of 128-token prompts: target and peer's figure, both times the floor; the peer's milliseconds.
DECODE_TARGETS = {1: 2.0, 8: 1.4, 32: 1.25, 128: 1.35, 256: 1.45}
DECODE_PEER = {1: 3.0, 8: 1.7, 32: 1.4, 128: 1.6, 256: 1.7}
DECODE_PEER_MS = {1: "3.39-3.45", 8: "3.82", 32: "4.39-4.66", 128: "5.38", 256: "7.26-8.96"}
LONG_PEER_MS = {32: "5.64", 128: "9.48"}
FIRST_TOKEN = {"long": (50.0, "56-93"), "short": (15.0, "12-22")}
IDLE_TARGETS = {1: 30.0, 128: 50.0}
PRINTED_KERNELS = 25
KEPT_KERNELS = 80


@dataclass(frozen=True)
class Sizes:
    """How much is measured; tokens, rows and repeats."""

    batches: tuple[int, ...] = (1, 8, 32, 128, 256)
    prompt: int = 128
    long_prompt: int = 4096
    long_batches: tuple[int, ...] = (32, 128)
    turns: int = 5
    lead: int = 8
    window: int = 64
    long_window: int = 32
    filtered_batch: int = 32
    runner_batches: tuple[int, ...] = (1, 8, 32, 128)
    runner_prompts: tuple[int, ...] = (512, 2048, 8192)
    generate_batches: tuple[int, ...] = (1, 32)
    prefill_batch: int = 8
    streams: int = 32
    quiet_steps: int = 100
    arrivals: int = 8
    trace_batches: tuple[int, ...] = (1, 32, 128)
    trace_steps: int = 20
    routing_steps: int = 4
    peer_tokens: int = 64
    peer_turns: int = 3
    copy_bytes: int = 4 << 30
    max_model_len: int = 8192


# A trial on a CPU: every path once, nothing worth reading.
SMOKE = Sizes(
    batches=(1, 4),
    prompt=16,
    long_prompt=80,
    long_batches=(2,),
    turns=2,
    lead=2,
    window=4,
    long_window=2,
    filtered_batch=4,
    runner_batches=(1, 4),
    runner_prompts=(20, 70),
    generate_batches=(1, 32),
    prefill_batch=2,
    streams=4,
    quiet_steps=6,
    arrivals=2,
    trace_batches=(1, 4),
    trace_steps=3,
    routing_steps=2,
    peer_tokens=4,
    peer_turns=1,
    copy_bytes=1 << 20,
    max_model_len=512,
)


@dataclass
class Bench:
    """What the sections share.

    Attributes:
        deadline: `time.time` after which no further case is begun; None sets no limit.
        copy_rate: bytes a second, read plus write, that floors are counted with.
    """

    log: Log
    folder: Path
    device: torch.device
    sizes: Sizes
    built: Built
    prompts: Prompts
    copy_rate: float
    deadline: float | None = None
    routing: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def config(self) -> DeepseekConfig:
        config: DeepseekConfig = self.built.model.config
        return config

    def may_begin(self, case: str) -> bool:
        """Whether there is time left; tells where there is none."""
        if self.deadline is None or time.time() < self.deadline:
            return True
        self.log.write(skipped=case, why="the time is used up")
        print(f"skipped {case}: the time is used up", flush=True)
        return False


def copy_rate(device: torch.device, size: int) -> float:
    """Bytes a second of an eager copy of `size` bytes of random data, read plus write; the median of ten."""
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            target.copy_(source)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            target.copy_(source)
            times.append(time.perf_counter() - started)
    del source, target
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return 2 * size / statistics.median(times[2:])


def floor_rate(measured: float, card: str) -> float:
    """The rate that floors are counted with."""
    return max(measured, LEAST_COPY_RATE.get(card, 0.0))


def section_decode(bench: Bench) -> None:
    """A decoding step over its floor, by batch."""
    sizes = bench.sizes
    for batch in sizes.batches:
        if not bench.may_begin(f"decode, batch {batch}"):
            continue
        found, routing = _decoded(bench, batch, sizes.prompt, sizes.window, turns=sizes.turns, windows=1)
        row = _decode_row(bench, "decode", batch, f"{sizes.prompt}-token prompts", found, routing)
        row.target, row.peer = DECODE_TARGETS.get(batch), str(DECODE_PEER.get(batch, ""))
        row.details["peer_ms"] = DECODE_PEER_MS.get(batch, "")
        bench.log.add(row)
        if batch == 1:
            bench.log.add(Row("decode", "batch 1, absolute", row.ms or 0.0, "ms", "less", 2.3, DECODE_PEER_MS[1]))
        _tell_routing(bench, batch, routing, row.details["experts_assumed"])


def section_invariant(bench: Bench) -> None:
    """The same in the batch-invariant mode, whose cost is its step over the decode section's of the same batch."""
    sizes = bench.sizes
    for batch in sizes.batches:
        if not bench.may_begin(f"invariant, batch {batch}"):
            continue
        found, routing = _decoded(bench, batch, sizes.prompt, sizes.window, turns=sizes.turns, windows=1)
        bench.log.add(_decode_row(bench, "invariant", batch, f"{sizes.prompt}-token prompts", found, routing))


def section_long(bench: Bench) -> None:
    """The same after long prompts: one prefill, consecutive windows."""
    sizes = bench.sizes
    for batch in sizes.long_batches:
        if not bench.may_begin(f"long, batch {batch}"):
            continue
        found, routing = _decoded(bench, batch, sizes.long_prompt, sizes.long_window, turns=1, windows=sizes.turns)
        row = _decode_row(bench, "long", batch, f"{sizes.long_prompt}-token prompts", found, routing)
        row.details["peer_ms"] = LONG_PEER_MS.get(batch, "")
        bench.log.add(row)
        _tell_routing(bench, batch, routing, row.details["experts_assumed"])


def section_filtered(bench: Bench) -> None:
    """The same with top_p and top_k, whose price is sampling's."""
    sizes, batch = bench.sizes, bench.sizes.filtered_batch
    if bench.may_begin(f"filtered, batch {batch}"):
        found, routing = _decoded(bench, batch, sizes.prompt, sizes.window, turns=sizes.turns, windows=1, **FILTERED)
        named = ", ".join(f"{name} {value}" for name, value in FILTERED.items())
        bench.log.add(_decode_row(bench, "filtered", batch, named, found, routing))


def _decoded(
    bench: Bench, batch: int, length: int, window: int, *, turns: int, windows: int, **sampling: Any
) -> tuple[list[Decoding], Routing]:
    """Decoding of `turns` times fresh prompts, and the routing of a few steps after the last of them."""
    sizes, engine = bench.sizes, bench.built.engine
    routing = Routing(bench.config.n_routed_experts)

    def watch(streams: Streams) -> None:
        # The step that is on its way was launched before.
        with watched_experts(bench.built, routing):
            for _ in range(sizes.routing_steps + 1):
                streams.step()

    if turns > 1:
        decode(engine, bench.prompts.draw(batch, length), lead=2, window=2, windows=1, **sampling)
    found = [
        decode(
            engine,
            bench.prompts.draw(batch, length),
            lead=sizes.lead,
            window=window,
            windows=windows,
            then=watch if turn == turns - 1 else None,
            **sampling,
        )
        for turn in range(turns)
    ]
    return found, routing


def _decode_row(bench: Bench, section: str, batch: int, case: str, found: list[Decoding], routing: Routing) -> Row:
    config = bench.config
    steps = [step for each in found for step in each.steps]
    seconds = statistics.median(steps)
    sparse = sum(config.is_moe(layer) for layer in range(config.num_hidden_layers))
    touched = sum(routing.touched.values())
    if not routing:
        touched = sparse * expected_touched(config.n_routed_experts, config.num_experts_per_tok, batch)
    read = step_bytes(config, rows=batch, context=found[0].context, touched=touched)
    floor = read.total / bench.copy_rate
    return Row(
        section,
        f"batch {batch}, {case}",
        seconds / floor,
        "x floor",
        ms=seconds * 1e3,
        floor_ms=floor * 1e3,
        tokens_per_second=batch / seconds,
        details={
            "steps_ms": [step * 1e3 for step in steps],
            "context": found[0].context,
            "floor_bytes": {name: getattr(read, name) for name in read.__dataclass_fields__},
            "touched_a_layer": touched / max(sparse, 1),
            # Without a hook the experts are those that balanced routing would touch.
            "experts_assumed": not routing,
        },
    )


def _tell_routing(bench: Bench, batch: int, routing: Routing, assumed: bool) -> None:
    if assumed:
        bench.log.write(skipped=f"routing, batch {batch}", why="the model has told no experts; the floor assumes them")
        return
    report = routing.report(bench.config.num_experts_per_tok, batch)
    value = report["touched_over_expected"]
    bench.log.add(Row("routing", f"batch {batch}", value, "of expected", "more", 0.95, details=report))


def section_generate(bench: Bench) -> None:
    """Tokens a second of whole generations, prefill included, to be compared with transformers'."""
    sizes = bench.sizes
    for batch in sizes.generate_batches:
        if not bench.may_begin(f"generate, batch {batch}"):
            continue
        times = []
        for _ in range(sizes.turns + 1):
            with Streams(bench.built.engine) as streams:
                prompts = bench.prompts.draw(batch, sizes.prompt)
                begin = time.perf_counter()
                streams.add(prompts, sizes.peer_tokens)
                times.append(streams.until(sizes.peer_tokens) - begin)
        seconds = statistics.median(times[1:])
        rate = batch * sizes.peer_tokens / seconds
        bench.log.add(Row("generate", f"batch {batch}", rate, "tokens/s", "more", ms=seconds * 1e3 / sizes.peer_tokens))


def section_prefill(bench: Bench) -> None:
    """Prompt tokens a second."""
    sizes = bench.sizes
    if not bench.may_begin("prefill"):
        return
    times = _first_tokens(bench, sizes.prefill_batch, sizes.long_prompt)
    seconds = statistics.median(times)
    rate = sizes.prefill_batch * sizes.long_prompt / seconds
    case = f"{sizes.prefill_batch} x {sizes.long_prompt}"
    bench.log.add(Row("prefill", case, rate, "tokens/s", "more", 90_000.0, "84,000-89,000", ms=seconds * 1e3))


def section_first(bench: Bench) -> None:
    """Time to the first token of one prompt with nothing else running."""
    for kind, length in (("long", bench.sizes.long_prompt), ("short", bench.sizes.prompt)):
        if bench.may_begin(f"first, {kind}"):
            times = _first_tokens(bench, 1, length)
            target, peer = FIRST_TOKEN[kind]
            value = statistics.median(times) * 1e3
            details = {"times_ms": [each * 1e3 for each in times]}
            bench.log.add(Row("first", f"{length}-token prompt", value, "ms", "less", target, peer, details=details))


def section_tail(bench: Bench) -> None:
    """Prefill of a prompt that is a little longer than a multiple of every tile, over one that is such a multiple."""
    sizes = bench.sizes
    if not bench.may_begin("tail"):
        return
    even, odd = sizes.long_prompt, sizes.long_prompt + 16
    turns = [(_first_tokens(bench, 1, even, turns=1)[0], _first_tokens(bench, 1, odd, turns=1)[0]) for _ in range(9)]
    seconds = [statistics.median(each) for each in zip(*turns, strict=True)]
    value = (seconds[1] / odd) / (seconds[0] / even)
    details = {"seconds": turns}
    case = f"{odd} tokens over {even}, per token"
    bench.log.add(Row("tail", case, value, "x", "less", 1.08, ms=seconds[1] * 1e3, details=details))


def _first_tokens(bench: Bench, count: int, length: int, turns: int | None = None) -> list[float]:
    """Seconds until each of `count` fresh prompts has its first token; one more turn before is not counted."""
    times = [
        first_tokens(bench.built.engine, bench.prompts.draw(count, length), bench.device)
        for _ in range((turns or bench.sizes.turns) + 1)
    ]
    return times[1:]


def section_streams(bench: Bench) -> None:
    """Gaps between the tokens of running streams while long prompts arrive, one after another."""
    sizes = bench.sizes
    if not bench.may_begin("streams"):
        return
    chunk = statistics.median(_first_tokens(bench, 1, bench.built.settings.prefill_chunk))
    arrived: list[float] = []
    with Streams(bench.built.engine) as streams:
        tokens = sizes.max_model_len - sizes.prompt
        running = streams.add(bench.prompts.draw(sizes.streams, sizes.prompt), tokens)
        begin = streams.until(sizes.lead)
        quiet_end = streams.until(sizes.lead + sizes.quiet_steps, running)
        quiet = token_gaps(streams, running, begin, quiet_end)
        begin = time.perf_counter()
        for _ in range(sizes.arrivals):
            started = time.perf_counter()
            late = streams.add(bench.prompts.draw(1, sizes.long_prompt), 1, prefix="long")
            arrived.append(streams.until(1, late) - started)
        if not all(len(streams.times[name]) < tokens for name in running):
            raise RuntimeError("a stream ended before the last long prompt had arrived; raise max_model_len")
        disturbed = token_gaps(streams, running, begin, time.perf_counter())
    median, p99 = statistics.median(quiet), percentile(disturbed, 0.99)
    limit = 2 * median + chunk
    bench.log.add(
        Row(
            "streams",
            f"{sizes.streams} streams, {sizes.arrivals} prompts of {sizes.long_prompt}, p99 gap",
            p99 * 1e3,
            "ms",
            "less",
            limit * 1e3,
            details={
                "quiet_median_ms": median * 1e3,
                "chunk_ms": chunk * 1e3,
                "chunk_tokens": bench.built.settings.prefill_chunk,
                "median_gap_ms": statistics.median(disturbed) * 1e3,
                "longest_gap_ms": max(disturbed) * 1e3,
                "prompt_seconds": arrived,
            },
        )
    )


def token_gaps(streams: Streams, names: list[str], begin: float, end: float) -> list[float]:
    """Seconds between consecutive tokens of a stream, of those that came after `begin` and not after `end`."""
    found = [
        after - before
        for name in names
        for before, after in pairwise(streams.times[name])
        if after > begin and after <= end
    ]
    if not found:
        raise RuntimeError("no stream had a token in the time that is looked at")
    return found


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(-(-len(ordered) * share // 1), 1.0).__int__() - 1]


def section_trace(bench: Bench) -> None:
    """Idle time between steps and time by kernel, from a trace of the profiler."""
    sizes = bench.sizes
    for batch in sizes.trace_batches:
        if not bench.may_begin(f"trace, batch {batch}"):
            continue
        with Streams(bench.built.engine) as streams:
            streams.add(bench.prompts.draw(batch, sizes.prompt), sizes.lead + 4 * sizes.trace_steps + 64)
            streams.until(sizes.lead)
            events = decode_trace(streams.step, sizes.trace_steps, bench.device)
        _tell_kernels(bench, batch, events)
        try:
            found = gpu_trace.gaps(events, sizes.trace_steps)
        except ValueError as error:
            bench.log.write(skipped=f"trace, gaps at batch {batch}", why=str(error))
            print(f"skipped gaps at batch {batch}: {error}", flush=True)
            continue
        told = gpu_trace.summary(found) | {"busy_share": gpu_trace.busy_share(events)}
        target = IDLE_TARGETS.get(batch)
        case = f"batch {batch}, idle between steps, median"
        bench.log.add(Row("trace", case, told["idle_median_us"], "us", "less", target, details=told))


def _tell_kernels(bench: Bench, batch: int, events: list[gpu_trace.Event]) -> None:
    steps = bench.sizes.trace_steps
    times = gpu_trace.kernel_times(events, steps)
    total, launches = sum(each.us for each in times), sum(each.launches for each in times)
    kept = [[each.name, round(each.us, 2), round(each.launches, 2)] for each in times[:KEPT_KERNELS]]
    details = {"launches": launches, "kernels": kept}
    bench.log.add(Row("trace", f"batch {batch}, GPU time a step", total, "us", details=details))
    print(f"  {launches:.0f} launches a step", flush=True)
    for each in times[:PRINTED_KERNELS]:
        print(f"  {each.us:9.1f} us {each.us / total:5.1%} {each.launches:7.1f} x  {each.name[:90]}", flush=True)


def decode_trace(step: Callable[[], object], steps: int, device: torch.device) -> list[gpu_trace.Event]:
    """The events of that many steps.

    Annotations need the CPU's events too, which slow the host down: steps that can be told apart by their graphs are
    traced without them.
    """
    if device.type != "cuda":
        return traced(step, steps, device, [ProfilerActivity.CPU])
    # The profiler's own start falls into the first trace of a process.
    traced(step, 2, device, [ProfilerActivity.CUDA])
    events = traced(step, steps, device, [ProfilerActivity.CUDA])
    with contextlib.suppress(ValueError):
        gpu_trace.gaps(events, steps)
        return events
    return traced(step, steps, device, [ProfilerActivity.CPU, ProfilerActivity.CUDA])


def traced(
    step: Callable[[], object], steps: int, device: torch.device, activities: list[ProfilerActivity]
) -> list[gpu_trace.Event]:
    """The events of calling `step` that often."""
    synchronize(device)
    with profile(activities=activities) as profiler:
        for _ in range(steps):
            with record_function(gpu_trace.STEP):
                step()
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[gpu_trace.Event] = json.loads(path.read_text(errors="replace"))["traceEvents"]
    return events


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "streams": section_streams,
    "decode": section_decode,
    "generate": section_generate,
    "prefill": section_prefill,
    "first": section_first,
    "tail": section_tail,
    "trace": section_trace,
    "filtered": section_filtered,
    "long": section_long,
    "invariant": section_invariant,
}
