"""Tokens a second of the engine, by both runners, against transformers' `generate`, and what a long prompt does to
running streams.

    python benchmarks/engine_vs_transformers.py [CHECKPOINT] [--batch 1 8] [--repeats 5] [--threads N]

All sides continue the same random prompts greedily, prefill included, in one process and by turns, so that whatever
else the machine does falls on all; medians are compared. Decoding is told apart: from when every prompt has its first
token. The engine's time is that of `Engine.step` with sampling,
detokenising and outputs; transformers' is `generate` with its cache, without detokenising. CHECKPOINT is assets/demo
where that is complete, and else a random one of its architecture and size; runner onnxruntime takes its export.

The floor of a decoding step is the time to read once the weights that it multiplies with, four bytes each, at the rate
at which the same threads read memory that no cache holds.
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
from deepseek_engine.models.config import DeepseekConfig, ModelConfig
from deepseek_engine.profiles import profile
from deepseek_engine.request import EngineRequest
from deepseek_engine.runners.onnxruntime import OnnxModel
from deepseek_engine.runners.torch import TorchRunner
from deepseek_engine.text.tokenizer import Tokenizer
from deepseek_ops.build import build
from deepseek_ops.exporter.export import export
from model_step import random_checkpoint
from piccard_contract.sampling import SamplingParams
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

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


# Runner and batch size -> times transformers' tokens a second; with torch prefill included, with onnxruntime decoding.
TARGETS = {("torch", 1): 2.5, ("torch", 8): 3.0, ("onnxruntime", 1): 6.0, ("onnxruntime", 8): 10.0}


@dataclass
class Speed:
    """Medians of one runner and batch size, tokens a second."""

    runner: str
    batch: int
    engine: float
    transformers: float
    ratio: float
    engine_decoding: float
    transformers_decoding: float
    decoding_ratio: float
    target: float | None
    equal_tokens: float


@dataclass
class StepCost:
    """Medians of a decoding step, milliseconds: all of it, what is not the model's part, and the floor."""

    runner: str
    batch: int
    sampling: str
    step: float
    overhead: float
    floor: float


@dataclass
class Stall:
    """Milliseconds between tokens of running streams while a long prompt arrives, under one runner and profile."""

    runner: str
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
        models = load_models(folder, Path(scratch))
        config = models["torch"].config
        tokenizer = Tokenizer.from_folder(folder)
        oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        oracle.generation_config.eos_token_id = None
        name = folder.name if arguments.checkpoint or folder == DEMO else "random"
        print(f"{name}: {config.architecture}, {torch.get_num_threads()} threads")
        speeds = [
            speed
            for batch in arguments.batch
            for speed in measure_speed(
                models, tokenizer, oracle, batch, arguments.prompt, arguments.tokens, arguments.repeats
            )
        ]
        bandwidth = read_bandwidth()
        costs = [
            measure_step(runner, model, tokenizer, batch, sampling, touched_bytes(config, batch) / bandwidth * 1e3)
            for batch in arguments.batch
            for sampling in SAMPLING
            for runner, model in models.items()
        ]
        stalls = [
            measure_stall(runner, model, tokenizer, profiled)
            for runner, model in models.items()
            for profiled in ("balanced", "latency")
        ]
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
        "read_bytes_per_second": bandwidth,
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
    models: dict[str, Model], tokenizer: Tokenizer, oracle: Any, batch: int, prompt: int, tokens: int, repeats: int
) -> list[Speed]:
    """Medians over `repeats` turns after one that is not counted; every turn has prompts of its own."""
    engines = {runner: make_engine(model, tokenizer) for runner, model in models.items()}
    ours: dict[str, list[tuple[float, float]]] = {runner: [] for runner in engines}
    equal: dict[str, list[float]] = {runner: [] for runner in engines}
    theirs: list[tuple[float, float]] = []
    for turn in range(repeats + 1):
        generator = torch.Generator().manual_seed(turn)
        prompts = torch.randint(2, oracle.config.vocab_size, (batch, prompt), generator=generator)
        turns = {runner: our_turn(engine, prompts.tolist(), tokens) for runner, engine in engines.items()}
        speeds, expected = their_turn(oracle, prompts, tokens)
        if not turn:
            continue
        theirs.append(speeds)
        for runner, (our_speeds, produced) in turns.items():
            ours[runner].append(our_speeds)
            equal[runner].append(sum(map(agreement, produced, expected)) / batch)
    found = []
    their_all, their_decoding = medians(theirs)
    for runner, several in ours.items():
        whole, decoding = medians(several)
        target, same = TARGETS.get((runner, batch)), statistics.mean(equal[runner])
        ratios = (whole / their_all, decoding / their_decoding)
        found.append(
            Speed(runner, batch, whole, their_all, ratios[0], decoding, their_decoding, ratios[1], target, same)
        )
    return found


def medians(speeds: list[tuple[float, float]]) -> tuple[float, float]:
    """Of each of the two."""
    return statistics.median(first for first, _ in speeds), statistics.median(second for _, second in speeds)


def our_turn(engine: Engine, prompts: list[list[int]], tokens: int) -> tuple[tuple[float, float], list[list[int]]]:
    """Tokens a second, of all the time and of decoding alone, and the tokens."""
    produced: dict[str, list[int]] = {str(place): [] for place in range(len(prompts))}
    started = time.perf_counter()
    for name, prompt in zip(produced, prompts, strict=True):
        engine.add(EngineRequest(name, prompt, greedy(tokens)))
    decoding, before = 0.0, 0
    while engine.has_work():
        for output in engine.step():
            produced[output.request_id].extend(output.token_ids)
        if not decoding and all(produced.values()):
            decoding, before = time.perf_counter(), sum(map(len, produced.values()))
    ended, count = time.perf_counter(), sum(map(len, produced.values()))
    return (count / (ended - started), (count - before) / (ended - decoding)), list(produced.values())


class FirstToken(StoppingCriteria):
    """Stops nothing, and notes when it was first asked: when every prompt had one token."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.time = self.time or time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def their_turn(oracle: Any, prompts: torch.Tensor, tokens: int) -> tuple[tuple[float, float], list[list[int]]]:
    """As ours."""
    mask, first = torch.ones_like(prompts), FirstToken()
    started = time.perf_counter()
    output = oracle.generate(
        prompts,
        attention_mask=mask,
        max_new_tokens=tokens,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([first]),
    )
    ended, batch = time.perf_counter(), len(prompts)
    speeds = (batch * tokens / (ended - started), batch * (tokens - 1) / (ended - first.time))
    return speeds, output[:, prompts.shape[1] :].tolist()


def agreement(ours: list[int], theirs: list[int]) -> float:
    """Share of the tokens before the first that differs; a near-tie may flip with the order of additions."""
    same = next((place for place, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(theirs))
    return same / len(theirs)


def load_models(folder: Path, scratch: Path) -> dict[str, Model]:
    """The checkpoint for either runner."""
    model = load_model(folder, dtype=torch.float32)
    exported = OnnxModel(export(folder, scratch / "export"), build(), model.config, threads=torch.get_num_threads())
    return {"torch": model, "onnxruntime": exported}


def read_bandwidth() -> float:
    """Bytes a second at which memory is read, with as many threads as a step has."""
    values = torch.zeros(1 << 27)
    times = []
    for _ in range(7):
        started = time.perf_counter()
        values.sum()
        times.append(time.perf_counter() - started)
    return 4 * len(values) / statistics.median(times[1:])


def touched_bytes(config: ModelConfig, batch: int) -> float:
    """Bytes in float32 of the weights that a decoding step multiplies with; of the experts those that are expected.

    Each of `batch` tokens takes num_experts_per_tok of n_routed_experts, as if by lot.
    """
    hidden, layers = config.hidden_size, config.num_hidden_layers
    head = config.vocab_size * hidden
    if not isinstance(config, DeepseekConfig):
        width = (2 * config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
        return 4 * (head + layers * (width * hidden + 3 * hidden * config.intermediate_size))
    heads, rank, rotary = config.num_attention_heads, config.kv_lora_rank, config.qk_rope_head_dim
    query = heads * (config.qk_nope_head_dim + rotary)
    attention = hidden * config.q_lora_rank + config.q_lora_rank * query if config.q_lora_rank else hidden * query
    attention += hidden * (rank + rotary) + heads * (config.qk_nope_head_dim + config.v_head_dim) * rank
    attention += heads * config.v_head_dim * hidden
    experts = config.n_routed_experts
    hit = experts * (1 - (1 - config.num_experts_per_tok / experts) ** batch) if experts else 0.0
    mixture = hidden * experts + (hit + config.n_shared_experts) * 3 * hidden * config.moe_intermediate_size
    sparse = sum(config.is_moe(layer) for layer in range(layers))
    dense = 3 * hidden * config.intermediate_size
    return 4 * (head + layers * attention + sparse * mixture + (layers - sparse) * dense)


def measure_step(runner: str, model: Model, tokenizer: Tokenizer, batch: int, sampling: str, floor: float) -> StepCost:
    """Steps in which `batch` sequences decode with the given sampling parameters, after some that are not counted."""
    timed = TimedModel(model)
    engine = make_engine(timed, tokenizer)
    params = SamplingParams(max_tokens=300, ignore_eos=True, **SAMPLING[sampling])
    for place in range(batch):
        prompt = list(range(2 + place, 66 + place))
        engine.add(EngineRequest(str(place), prompt, params))
    steps, overheads = [], []
    for step in range(150):
        timed.seconds, started = 0.0, time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - started
        if step >= 20:
            steps.append(seconds)
            overheads.append(seconds - timed.seconds)
    step, overhead = (statistics.median(values) * 1e3 for values in (steps, overheads))
    return StepCost(runner, batch, sampling, step, overhead, floor)


def measure_stall(runner: str, model: Model, tokenizer: Tokenizer, name: str) -> Stall:
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
    return Stall(runner, name, median, longest, chunk, 2 * median + chunk, prompt_seconds)


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
    print(f"{'':>17} {'with prefill tok/s':>28} {'decoding tok/s':>28}")
    head = f"{'engine':>10} {'transformers':>12} {'x':>5}"
    print(f"{'runner':>11} {'batch':>5} {head} {head} {'target':>6} {'same':>6}")
    for one in speeds:
        target = "" if one.target is None else f"{one.target:.1f}"
        print(
            f"{one.runner:>11} {one.batch:5} {one.engine:10.1f} {one.transformers:12.1f} {one.ratio:5.2f}"
            f" {one.engine_decoding:10.1f} {one.transformers_decoding:12.1f} {one.decoding_ratio:5.2f}"
            f" {target:>6} {one.equal_tokens:6.1%}"
        )


def print_costs(costs: list[StepCost]) -> None:
    print(f"{'runner':>11} {'batch':>5} {'sampling':>12} {'step ms':>8} {'beside the model ms':>20} {'floor ms':>8}")
    for one in costs:
        print(
            f"{one.runner:>11} {one.batch:5} {one.sampling:>12} {one.step:8.2f} {one.overhead:20.2f} {one.floor:8.2f}"
        )


def print_stalls(stalls: list[Stall]) -> None:
    print(f"{'runner':>11} {'profile':>10} {'median':>7} {'longest':>7} {'chunk':>7} {'limit ms':>8} {'prompt s':>8}")
    for one in stalls:
        print(
            f"{one.runner:>11} {one.profile:>10} {one.quiet_median:7.2f} {one.longest:7.2f} {one.one_chunk:7.2f}"
            f" {one.limit:8.2f} {one.prompt_seconds:8.2f}"
        )


if __name__ == "__main__":
    main()
