"""Tokens a second of the engine against transformers' `generate`, and what a long prompt does to running streams.

    python benchmarks/engine_vs_transformers.py [CHECKPOINT] [--batch 1 8] [--repeats 5] [--threads N]

Both sides continue the same random prompts greedily, prefill included, in one process and by turns, so that whatever
else the machine does falls on both; medians are compared. The engine's time is that of `Engine.step` with sampling,
detokenising and outputs; transformers' is `generate` with its cache, without detokenising. CHECKPOINT is assets/demo
where that is complete, and else a random one of its architecture and size.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from deepseek_engine.batch import Batch
from deepseek_engine.cache_spec import Cache
from deepseek_engine.engine import Engine
from deepseek_engine.models import Model, load_model
from deepseek_engine.profiles import profile
from deepseek_engine.request import EngineRequest
from deepseek_engine.runners.torch import TorchRunner
from deepseek_engine.text.tokenizer import Tokenizer
from model_step import random_checkpoint
from piccard_contract.sampling import SamplingParams
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "assets" / "demo"
RESULTS = Path(__file__).parent / "results" / "engine_vs_transformers.json"
STREAMS = 8
LONG_PROMPT = 2000
# Steps before the long prompt comes, from which the undisturbed gap is taken.
QUIET_STEPS = 100
SAMPLING = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.6, "seed": 1},
    "top_p": {"temperature": 0.6, "top_p": 0.95, "seed": 1},
}


@dataclass
class Speed:
    """Medians of one batch size, tokens a second."""

    batch: int
    engine: float
    transformers: float
    ratio: float
    target: float | None
    equal_tokens: float


@dataclass
class StepCost:
    """Medians of a decoding step, milliseconds: all of it, and what is not the model's forward and logits."""

    batch: int
    sampling: str
    step: float
    overhead: float


@dataclass
class Stall:
    """Milliseconds between tokens of running streams while a long prompt arrives, under one profile."""

    profile: str
    quiet_median: float
    longest: float
    one_chunk: float
    limit: float
    prompt_seconds: float


class TimedModel:
    """A model that adds up the time spent in it."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.config = model.config
        self.cache_spec = model.cache_spec
        self.seconds = 0.0

    def forward(self, batch: Batch, cache: Cache) -> torch.Tensor:
        started = time.perf_counter()
        hidden = self._model.forward(batch, cache)
        self.seconds += time.perf_counter() - started
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        started = time.perf_counter()
        logits = self._model.logits(hidden)
        self.seconds += time.perf_counter() - started
        return logits


def main() -> None:
    arguments = parse_arguments()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.checkpoint or default_checkpoint(Path(scratch))
        model = load_model(folder, dtype=torch.float32)
        tokenizer = Tokenizer.from_folder(folder)
        oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        oracle.generation_config.eos_token_id = None
        name = folder.name if arguments.checkpoint or folder == DEMO else "random"
        print(f"{name}: {model.config.architecture}, {torch.get_num_threads()} threads")
        speeds = [
            measure_speed(model, tokenizer, oracle, batch, arguments.prompt, arguments.tokens, arguments.repeats)
            for batch in arguments.batch
        ]
        costs = [
            measure_step(model, tokenizer, batch, name, params)
            for batch in arguments.batch
            for name, params in SAMPLING.items()
        ]
        stalls = [measure_stall(model, tokenizer, name) for name in ("balanced", "latency")]
    print_speeds(speeds)
    print_costs(costs)
    print_stalls(stalls)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "checkpoint": name,
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "prompt_tokens": arguments.prompt,
        "new_tokens": arguments.tokens,
        "repeats": arguments.repeats,
        "tokens_per_second": [asdict(speed) for speed in speeds],
        "decoding_step_ms": [asdict(cost) for cost in costs],
        "long_prompt": [asdict(stall) for stall in stalls],
    }
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?", help="a Hugging Face folder with its tokenizer")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="requests at once")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens generated for each")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, help="of torch; default: its own choice")
    parser.add_argument("--output", type=Path, default=RESULTS, help="JSON report")
    return parser.parse_args()


def default_checkpoint(scratch: Path) -> Path:
    """assets/demo where it is complete, else a random checkpoint with a tokenizer of single bytes."""
    if (DEMO / "config.json").exists() and any(DEMO.glob("*.safetensors")):
        return DEMO
    folder = random_checkpoint(scratch)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    raw.decoder = decoders.ByteLevel()
    raw.save(str(folder / "tokenizer.json"))
    return folder


def make_engine(model: Model, tokenizer: Tokenizer, name: str = "balanced", **changes: Any) -> Engine:
    settings = profile(name, cache_bytes=256 << 20, **changes)
    return Engine(TorchRunner(model, settings), tokenizer, settings)


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def measure_speed(
    model: Model, tokenizer: Tokenizer, oracle: Any, batch: int, prompt: int, tokens: int, repeats: int
) -> Speed:
    """Medians over `repeats` turns after one that is not counted; every turn has prompts of its own."""
    engine = make_engine(model, tokenizer)
    ours, theirs, equal = [], [], []
    for turn in range(repeats + 1):
        generator = torch.Generator().manual_seed(turn)
        prompts = torch.randint(2, model.config.vocab_size, (batch, prompt), generator=generator)
        seconds, produced = our_turn(engine, prompts.tolist(), tokens)
        other_seconds, expected = their_turn(oracle, prompts, tokens)
        if turn:
            ours.append(batch * tokens / seconds)
            theirs.append(batch * tokens / other_seconds)
            equal.append(sum(map(agreement, produced, expected)) / batch)
    engine_speed, their_speed = statistics.median(ours), statistics.median(theirs)
    target = {1: 2.5, 8: 3.0}.get(batch)
    return Speed(batch, engine_speed, their_speed, engine_speed / their_speed, target, statistics.mean(equal))


def our_turn(engine: Engine, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
    produced: dict[str, list[int]] = {str(place): [] for place in range(len(prompts))}
    started = time.perf_counter()
    for name, prompt in zip(produced, prompts, strict=True):
        engine.add(EngineRequest(name, prompt, greedy(tokens)))
    while engine.has_work():
        for output in engine.step():
            produced[output.request_id].extend(output.token_ids)
    return time.perf_counter() - started, list(produced.values())


def their_turn(oracle: Any, prompts: torch.Tensor, tokens: int) -> tuple[float, list[list[int]]]:
    mask = torch.ones_like(prompts)
    started = time.perf_counter()
    output = oracle.generate(
        prompts, attention_mask=mask, max_new_tokens=tokens, do_sample=False, use_cache=True, pad_token_id=0
    )
    return time.perf_counter() - started, output[:, prompts.shape[1] :].tolist()


def agreement(ours: list[int], theirs: list[int]) -> float:
    """Share of the tokens before the first that differs; a near-tie may flip with the order of additions."""
    same = next((place for place, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(theirs))
    return same / len(theirs)


def measure_step(model: Model, tokenizer: Tokenizer, batch: int, name: str, params: dict[str, Any]) -> StepCost:
    """Steps in which `batch` sequences decode with the given sampling parameters, after some that are not counted."""
    timed = TimedModel(model)
    engine = make_engine(timed, tokenizer)
    for place in range(batch):
        prompt = list(range(2 + place, 66 + place))
        engine.add(EngineRequest(str(place), prompt, SamplingParams(max_tokens=300, ignore_eos=True, **params)))
    steps, overheads = [], []
    for step in range(150):
        timed.seconds, started = 0.0, time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - started
        if step >= 20:
            steps.append(seconds)
            overheads.append(seconds - timed.seconds)
    return StepCost(batch, name, statistics.median(steps) * 1e3, statistics.median(overheads) * 1e3)


def measure_stall(model: Model, tokenizer: Tokenizer, name: str) -> Stall:
    """Eight streams run; a prompt of 2,000 tokens arrives; the gaps between the tokens of each stream are taken."""
    engine = make_engine(model, tokenizer, name)
    length = min(LONG_PROMPT, engine.max_model_len - 1)
    budget = engine.max_model_len - 40
    generator = torch.Generator().manual_seed(1)
    for stream in range(STREAMS):
        prompt = torch.randint(2, model.config.vocab_size, (32,), generator=generator).tolist()
        engine.add(EngineRequest(str(stream), prompt, greedy(budget)))
    long_prompt = torch.randint(2, model.config.vocab_size, (length,), generator=generator).tolist()
    quiet = step_gaps(engine, QUIET_STEPS)[10:]
    engine.add(EngineRequest("long", long_prompt, greedy(1)))
    started = time.perf_counter()
    disturbed = step_gaps(engine, None, until="long")
    prompt_seconds = time.perf_counter() - started
    for stream in range(STREAMS):
        engine.abort(str(stream))
    median, longest = statistics.median(quiet) * 1e3, max(disturbed) * 1e3
    chunk = chunk_seconds(model, tokenizer, name, long_prompt) * 1e3
    return Stall(name, median, longest, chunk, 2 * median + chunk, prompt_seconds)


def step_gaps(engine: Engine, steps: int | None, until: str | None = None) -> list[float]:
    """Seconds of consecutive steps, in each of which every running stream has to get a token."""
    gaps: list[float] = []
    while steps is None or len(gaps) < steps:
        started = time.perf_counter()
        told = {output.request_id for output in engine.step()}
        gaps.append(time.perf_counter() - started)
        if steps is None and len(told - {until}) != STREAMS:
            raise RuntimeError("a stream got no token in a step")
        if until in told:
            break
    return gaps


def chunk_seconds(model: Model, tokenizer: Tokenizer, name: str, prompt: list[int]) -> float:
    """Median seconds of one full prefill chunk of the prompt with nothing else running."""
    chunk = profile(name).prefill_chunk
    engine = make_engine(model, tokenizer, name, max_num_batched_tokens=chunk, max_num_seqs=1)
    engine.add(EngineRequest("alone", prompt, greedy(1)))
    times = []
    while engine.has_work():
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    return statistics.median(times[:-1] or times)


def print_speeds(speeds: list[Speed]) -> None:
    print(f"{'batch':>5} {'engine tok/s':>12} {'transformers':>12} {'ratio':>6} {'target':>6} {'same':>6}")
    for one in speeds:
        target = "" if one.target is None else f"{one.target:.1f}"
        print(
            f"{one.batch:5} {one.engine:12.1f} {one.transformers:12.1f} {one.ratio:6.2f} {target:>6} "
            f"{one.equal_tokens:6.1%}"
        )


def print_costs(costs: list[StepCost]) -> None:
    print(f"{'batch':>5} {'sampling':>12} {'step ms':>8} {'beside the model ms':>20}")
    for one in costs:
        print(f"{one.batch:5} {one.sampling:>12} {one.step:8.2f} {one.overhead:20.2f}")


def print_stalls(stalls: list[Stall]) -> None:
    print(f"{'profile':>10} {'median ms':>9} {'longest ms':>10} {'chunk ms':>8} {'limit ms':>8} {'prompt s':>8}")
    for one in stalls:
        print(
            f"{one.profile:>10} {one.quiet_median:9.2f} {one.longest:10.2f} {one.one_chunk:8.2f} {one.limit:8.2f} "
            f"{one.prompt_seconds:8.2f}"
        )


if __name__ == "__main__":
    main()
