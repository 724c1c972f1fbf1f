"""What the engine's profiles make of one load, and what a session's cached prefix is worth.

    python benchmarks/profiles.py [--runner onnxruntime] [--streams 64] [--rounds 3]

Prints the tables of docs/performance.md and keeps the figures, with those of every round, in results/profiles.json.
One engine a profile on the demo checkpoint, the profiles by turns; figures are medians over the rounds. Streams: all
come at once, half with prompts of 32 tokens and half with 256, each for 64 tokens; told are tokens a second, the time
to the first token (median and 95th percentile) and the longest gap between two tokens of a stream (median of the
streams). Sessions: conversations of four turns by turns, each of which begins with all that was said before; told are
the share of prompt tokens that came from the cache and the time to the first token of the turns after the first, with
the prefix cache and without.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

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
    load = os.getloadavg()
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
        "machine": {"cpus": os.cpu_count(), "load_average_before": load, "load_average_after": os.getloadavg()},
        "streams": {name: medians([asdict(each) for each in rounds]) for name, rounds in streams.items()},
        "sessions": {name: medians([asdict(each) for each in rounds]) for name, rounds in sessions.items()},
        "rounds": {
            "streams": {name: [asdict(each) for each in rounds] for name, rounds in streams.items()},
            "sessions": {name: [asdict(each) for each in rounds] for name, rounds in sessions.items()},
        },
    }
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    print(tables(report))


def tables(report: dict[str, Any]) -> str:
    """The figures as docs/performance.md has them."""
    lines = [
        "| Profile | Tokens a second | First token, median; 95th percentile | Longest gap of a stream, median |",
        "|---|---|---|---|",
    ]
    for name, f in report["streams"].items():
        first = f"{f['first_token_median']:,.0f}; {f['first_token_p95']:,.0f} ms"
        lines.append(f"| `{name}` | {f['tokens_per_second']:,.0f} | {first} | {f['longest_gap_median']:.0f} ms |")
    lines += ["", "| Sessions | First token of a later turn, median | Prompt tokens from the cache |", "|---|---|---|"]
    for name, f in report["sessions"].items():
        lines.append(f"| {name} | {f['first_token_median']:.0f} ms | {100 * f['cached_share']:.0f} % |")
    return "\n".join(lines)


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
