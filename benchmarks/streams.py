"""Concurrent gRPC streams through the ensemble against the same streams on the version itself, in one run.

Starts a server of the demo checkpoint, or takes the one at --url. Rounds alternate between the two paths; figures are
medians over the rounds of the median (and 95th percentile) time to first token and of tokens a second. What a response
costs is told in processor time (user and system) of the client and of each process of a server that was started here.

    python benchmarks/streams.py --streams 64 --tokens 64 --rounds 5
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tritonclient.grpc.aio as grpcclient
from demo_server import demo_server
from piccard.triton_binary import STUB_NAME

RESULTS = Path(__file__).parent / "results"


@dataclass(slots=True)
class Stream:
    """One stream: seconds to its first token, seconds in all, tokens, responses."""

    first_token: float
    seconds: float
    tokens: int
    responses: int


@dataclass(slots=True)
class Round:
    """One round of concurrent streams."""

    path: str
    first_token_median: float
    first_token_p95: float
    tokens_per_second: float
    tokens_per_response: float
    # Process -> microseconds of processor time a response.
    processor_us: dict[str, float]


def processor_seconds() -> dict[str, float]:
    """Process -> seconds of processor time so far: this one, tritonserver, and its models as `model/version`."""
    times = {"client": sum(psutil.Process().cpu_times()[:2])}
    for process in psutil.Process().children(recursive=True):
        try:
            command, used = process.cmdline(), sum(process.cpu_times()[:2])
        except psutil.NoSuchProcess:
            continue
        name = Path(command[0]).name if command else ""
        if name == STUB_NAME:
            name = "/".join(Path(command[1]).parts[-3:-1])
        times[name] = times.get(name, 0.0) + used
    return times


def inputs(prompt: str, tokens: int) -> list[grpcclient.InferInput]:
    """Tensors of one greedy request of exactly `tokens` tokens."""
    sampling = json.dumps({"temperature": 0, "max_tokens": tokens, "ignore_eos": True})
    tensors = []
    for name, value in (("text_input", prompt), ("sampling_parameters", sampling)):
        tensor = grpcclient.InferInput(name, [1], "BYTES")
        tensor.set_data_from_numpy(np.array([value.encode()], dtype=object))
        tensors.append(tensor)
    stream = grpcclient.InferInput("stream", [1], "BOOL")
    stream.set_data_from_numpy(np.array([True]))
    return [*tensors, stream]


async def one(client: grpcclient.InferenceServerClient, request: dict[str, Any]) -> Stream:
    """Run one request on a stream of its own."""

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield request

    start = time.perf_counter()
    first, tokens, responses = 0.0, 0, 0
    async for result, error in client.stream_infer(requests()):
        if error is not None:
            raise error
        ids = result.as_numpy("token_ids")
        if ids is not None and ids.size:
            first = first or time.perf_counter() - start
            tokens += int(ids.size)
            responses += 1
        if result.get_response().parameters["triton_final_response"].bool_param:
            break
    return Stream(first, time.perf_counter() - start, tokens, responses)


async def round_of(client: grpcclient.InferenceServerClient, path: str, args: argparse.Namespace, turn: int) -> Round:
    """Start all streams of one path at once and sum them up."""
    target = (
        {"model_name": args.service, "model_version": ""}
        if path == "ensemble"
        else {"model_name": f"{args.service}_llm", "model_version": str(args.version)}
    )
    # The pin keeps the ensemble on the very version that the direct path calls.
    pin = {"parameters": {"version": args.version}} if path == "ensemble" else {}
    # Prompts differ by round and stream, so that neither path finds the other's blocks in the prefix cache.
    requests = [
        {"inputs": inputs(f"# {path} {turn} {index}\n{args.prompt}", args.tokens), **target, **pin}
        for index in range(args.streams)
    ]
    before, start = processor_seconds(), time.perf_counter()
    streams = await asyncio.gather(*(one(client, request) for request in requests))
    seconds, after = time.perf_counter() - start, processor_seconds()
    firsts = sorted(stream.first_token for stream in streams)
    tokens = sum(stream.tokens for stream in streams)
    if tokens != args.streams * args.tokens:
        raise SystemExit(f"{path}: {tokens} tokens came, {args.streams * args.tokens} were asked for")
    responses = sum(stream.responses for stream in streams)
    return Round(
        path,
        statistics.median(firsts),
        firsts[int(0.95 * (len(firsts) - 1))],
        tokens / seconds,
        tokens / responses,
        {name: round(1e6 * (after[name] - before.get(name, 0.0)) / responses, 1) for name in after},
    )


async def measure(args: argparse.Namespace) -> dict[str, list[Round]]:
    """All rounds of both paths, alternating, after one of each that is not counted."""
    client = grpcclient.InferenceServerClient(args.url)
    rounds: dict[str, list[Round]] = {"direct": [], "ensemble": []}
    for turn in range(args.rounds + 1):
        for path, kept in rounds.items():
            result = await round_of(client, path, args, turn)
            if turn:
                kept.append(result)
    await client.close()
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="gRPC endpoint of a running server; else one is started")
    parser.add_argument("--service", default="deepseek")
    parser.add_argument("--version", type=int, default=1)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", default="def fibonacci(n):\n")
    args = parser.parse_args()
    if args.url:
        rounds = asyncio.run(measure(args))
    else:
        with demo_server() as args.url:
            rounds = asyncio.run(measure(args))
    print(f"{'path':10} {'first token median':>20} {'p95':>10} {'tokens/s':>10} {'tokens/response':>16}")
    medians: dict[str, dict[str, float]] = {}
    for path, kept in rounds.items():
        values = [asdict(item) for item in kept]
        figures = [key for key in values[0] if key not in ("path", "processor_us")]
        medians[path] = {key: statistics.median(v[key] for v in values) for key in figures}
        m = medians[path]
        print(
            f"{path:10} {m['first_token_median'] * 1000:17.1f} ms {m['first_token_p95'] * 1000:7.1f} ms"
            f" {m['tokens_per_second']:10.1f} {m['tokens_per_response']:16.2f}"
        )
    direct, ensemble = medians["direct"], medians["ensemble"]
    bound = 1.3 * direct["first_token_median"] + 0.040
    print(
        f"first token {ensemble['first_token_median']:.3f} s against a bound of {bound:.3f} s (1.3 x direct + 40 ms);"
        f" tokens a second {ensemble['tokens_per_second'] / direct['tokens_per_second']:.2f} x direct (target 0.9)"
    )
    processors = {
        path: {name: statistics.median(r.processor_us.get(name, 0.0) for r in kept) for name in kept[0].processor_us}
        for path, kept in rounds.items()
    }
    for path, used in processors.items():
        told = ", ".join(f"{name} {us:.0f}" for name, us in used.items() if us >= 1.0)
        print(f"{path}: microseconds of processor time a response: {told}")
    RESULTS.mkdir(exist_ok=True)
    result = {
        "settings": {key: value for key, value in vars(args).items() if key != "url"},
        "medians": medians,
        "processor_us": processors,
        "rounds": {k: [asdict(r) for r in v] for k, v in rounds.items()},
    }
    (RESULTS / "streams.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
