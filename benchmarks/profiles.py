"""What the engine's profiles make of one load, and what a session's cached prefix is worth.

    python benchmarks/profiles.py [--runner onnxruntime] [--streams 64] [--rounds 3]

One engine a profile on the demo checkpoint, the profiles by turns; figures are medians over the rounds. Streams: all
come at once, half with prompts of 32 tokens and half with 256, each for 64 tokens; told are tokens a second, the time
to the first token (median and 95th percentile) and the longest gap between two tokens of a stream (median of the
streams). Sessions: conversations of four turns by turns, each of which begins with all that was said before; told are
the share of prompt tokens that came from the cache and the time to the first token of the turns after the first, with
the prefix cache and without.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch
from deepseek_engine.cpu_threads import compute_threads
from deepseek_engine.engine import Engine
from deepseek_engine.models import Model
from deepseek_engine.profiles import PROFILES, profile
from deepseek_engine.request import EngineRequest
from deepseek_engine.runners.torch import TorchRunner
from deepseek_engine.text.tokenizer import Tokenizer
from engine_vs_transformers import DEMO, greedy, load_models

RESULTS = Path(__file__).parent / "results" / "profiles.json"
PROMPTS = (32, 256)
TOKENS = 64
TURNS = 4
SAID, ANSWERED = 96, 32


@dataclass
class Streams:
    """One profile under many streams that come at once; times in milliseconds."""

    tokens_per_second: float
    first_token_median: float
    first_token_p95: float
    longest_gap_median: float


@dataclass
class Sessions:
    """Turns after the first of conversations; milliseconds and a share."""

    first_token_median: float
    cached_share: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runner", choices=("torch", "onnxruntime"), default="onnxruntime")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(compute_threads())
    with tempfile.TemporaryDirectory() as scratch:
        model, tokenizer = load_models(DEMO, Path(scratch))[options.runner], Tokenizer.from_folder(DEMO)
        streams: dict[str, list[Streams]] = defaultdict(list)
        sessions: dict[str, list[Sessions]] = defaultdict(list)
        for turn in range(options.rounds):
            for name in PROFILES:
                streams[name].append(run_streams(engine_of(model, tokenizer, name), options.streams, turn))
            for name, caching in (("with prefix cache", True), ("without", False)):
                engine = engine_of(model, tokenizer, "balanced", enable_prefix_caching=caching)
                sessions[name].append(run_sessions(engine, options.sessions, turn))
    report = {
        "settings": vars(options),
        "streams": {name: medians([asdict(each) for each in rounds]) for name, rounds in streams.items()},
        "sessions": {name: medians([asdict(each) for each in rounds]) for name, rounds in sessions.items()},
    }
    for part in ("streams", "sessions"):
        for name, figures in report[part].items():
            print(f"{name:>18}: " + ", ".join(f"{key} {value:.4g}" for key, value in figures.items()))
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")


def engine_of(model: Model, tokenizer: Tokenizer, name: str, **changes: bool) -> Engine:
    settings = profile(name, cache_bytes=1 << 30, max_queue_seconds=3600.0, **changes)
    return Engine(TorchRunner(model, settings), tokenizer, settings)


def prompt_of(length: int, seed: str) -> list[int]:
    return random.Random(seed).choices(range(2, 2000), k=length)


def run_streams(engine: Engine, count: int, turn: int) -> Streams:
    """All come at once; each has TOKENS tokens."""
    started = time.perf_counter()
    for place in range(count):
        prompt = prompt_of(PROMPTS[place % len(PROMPTS)], f"{turn} {place}")
        engine.add(EngineRequest(str(place), prompt, greedy(TOKENS)))
    times = drain(engine)
    seconds = time.perf_counter() - started
    firsts = sorted((each[0] - started) * 1e3 for each in times.values())
    gaps = [max(b - a for a, b in pairwise(each)) * 1e3 for each in times.values()]
    return Streams(
        count * TOKENS / seconds, statistics.median(firsts), firsts[int(0.95 * (count - 1))], statistics.median(gaps)
    )


def run_sessions(engine: Engine, count: int, turn: int) -> Sessions:
    """Conversations whose turns follow one another, one request at a time."""
    histories = {str(place): [] for place in range(count)}
    firsts, asked, cached = [], 0, 0
    for step in range(TURNS):
        for name, history in histories.items():
            history += prompt_of(SAID, f"{turn} {name} {step}")
            before, started = engine.stats().prefix_hit_tokens, time.perf_counter()
            engine.add(EngineRequest(f"{name} {step}", list(history), greedy(ANSWERED)))
            first = 0.0
            while engine.has_work():
                for output in engine.step():
                    first = first or time.perf_counter() - started
                    history += output.token_ids
            if step:
                firsts.append(first * 1e3)
                asked += len(history) - ANSWERED
                cached += engine.stats().prefix_hit_tokens - before
    return Sessions(statistics.median(firsts), cached / asked)


def drain(engine: Engine) -> dict[str, list[float]]:
    """Request to the times of its tokens."""
    times: dict[str, list[float]] = defaultdict(list)
    while engine.has_work():
        for output in engine.step():
            times[output.request_id] += [time.perf_counter()] * len(output.token_ids)
    return times


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Of each figure."""
    return {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}


if __name__ == "__main__":
    main()
