"""Streams through the gateway against the same streams on the ensemble, in one run.

Starts a server of the demo checkpoint with its gateway. Rounds alternate between the two paths; figures are medians
over the rounds: of the median time to first token of single requests, one after the other, and of tokens a second of
all streams at once.

    python benchmarks/gateway.py --streams 64 --tokens 64 --rounds 5
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tritonclient.grpc.aio as grpcclient
from streams import Stream, inputs, one

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from piccard_server import RunningServer

RESULTS = Path(__file__).parent / "results"
STARTUP = 180.0

# The pin keeps both paths on the same version.
VERSION = 1


async def through_gateway(address: str, prompt: str, tokens: int) -> Stream:
    """One stream, read by a client that costs next to nothing, so that the gateway's cost is what is measured."""
    host, _, port = address.partition(":")
    body = {"model": "deepseek", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "version": VERSION, "stream_options": {"include_usage": True}}
    content = json.dumps(body).encode()
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    first, events, last = 0.0, 0, b""
    try:
        while True:
            line = await reader.readline()
            if not line or line.startswith(b"data: [DONE]"):
                break
            if line.startswith(b"data: "):
                first = first or time.perf_counter() - start
                events += 1
                last = line
    finally:
        writer.close()
    usage: Any = json.loads(last.removeprefix(b"data: ")).get("usage")
    if usage is None:
        raise SystemExit(f"the gateway answered {last.decode()}")
    return Stream(first, time.perf_counter() - start, usage["completion_tokens"], events)


async def through_ensemble(client: grpcclient.InferenceServerClient, prompt: str, tokens: int) -> Stream:
    target = {"model_name": "deepseek", "model_version": "", "parameters": {"version": VERSION}}
    return await one(client, {"inputs": inputs(prompt, tokens), **target})


async def measure(server: RunningServer, args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """All rounds of both paths, alternating, after one of each that is not counted."""
    client = grpcclient.InferenceServerClient(server.grpc)

    def stream(path: str, prompt: str, tokens: int) -> Any:
        if path == "gateway":
            return through_gateway(server.gateway, prompt, tokens)
        return through_ensemble(client, prompt, tokens)

    rounds: dict[str, list[dict[str, float]]] = {"ensemble": [], "gateway": []}
    for turn in range(args.rounds + 1):
        for path, kept in rounds.items():
            # Prompts differ, so that neither path finds the other's blocks in the prefix cache.
            singles = [(await stream(path, f"# {path} {turn} one {k}\n", 4)).first_token for k in range(args.singles)]
            start = time.perf_counter()
            prompts = [f"# {path} {turn} {index}\ndef fibonacci(n):\n" for index in range(args.streams)]
            streams = await asyncio.gather(*(stream(path, prompt, args.tokens) for prompt in prompts))
            seconds = time.perf_counter() - start
            tokens = sum(item.tokens for item in streams)
            if tokens != args.streams * args.tokens:
                raise SystemExit(f"{path}: {tokens} tokens came, {args.streams * args.tokens} were asked for")
            if turn:
                kept.append({"first_token": statistics.median(singles), "tokens_per_second": tokens / seconds})
    await client.close()
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--singles", type=int, default=20, help="requests one after the other, for the first token")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="piccard-bench-") as folder:
        home = Path(folder) / "home"
        subprocess.run([sys.executable, "-m", "piccard", "init", str(home)], check=True, stdout=subprocess.DEVNULL)
        server = RunningServer(home, "--gateway", threads=None)
        try:
            server.wait_ready(STARTUP)
            rounds = asyncio.run(measure(server, args))
        finally:
            server.stop()
    medians = {
        path: {name: statistics.median(item[name] for item in kept) for name in kept[0]}
        for path, kept in rounds.items()
    }
    added = medians["gateway"]["first_token"] - medians["ensemble"]["first_token"]
    share = medians["gateway"]["tokens_per_second"] / medians["ensemble"]["tokens_per_second"]
    for path, figures in medians.items():
        first, rate = 1000 * figures["first_token"], figures["tokens_per_second"]
        print(f"{path:10} {first:8.1f} ms to the first token {rate:8.1f} tokens/s")
    print(f"the gateway adds {1000 * added:.1f} ms (target 3) and carries {share:.2f} x the ensemble (target 0.9)")
    RESULTS.mkdir(exist_ok=True)
    result = {"settings": vars(args), "medians": medians, "added_ms": 1000 * added, "share": share, "rounds": rounds}
    (RESULTS / "gateway.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
