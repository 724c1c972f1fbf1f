"""Streams through the gateway against the same streams on the ensemble, in one run.

Starts a server of the demo checkpoint with its gateway. Single requests come in turn on the ensemble, through the
gateway on a connection that its client keeps, as the ensemble's does, and through it on a new one; the order changes
with each turn, and what the gateway adds to a first token is the median of the differences within a turn. Then all
streams come at once, on one path and on the other, for tokens a second; figures are medians over the rounds.

    python benchmarks/gateway.py --streams 64 --tokens 64 --rounds 5
"""

import argparse
import asyncio
import json
import os
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

# Paths of single requests, and of many streams at once.
SINGLES = ("ensemble", "gateway", "gateway, new connection")
CROWDS = ("ensemble", "gateway")


class GatewayClient:
    """Sends streams over a connection that it keeps, at next to no cost, so that the gateway's is what is measured."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def connect(self) -> None:
        """Have a connection, whose cost is then that of nothing that is measured."""
        self._connection = self._connection or await self._connect()

    async def stream(self, prompt: str, tokens: int) -> Stream:
        """One stream to its end."""
        body = {"model": "deepseek", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "version": VERSION, "stream_options": {"include_usage": True}}
        content = json.dumps(body).encode()
        start = time.perf_counter()
        reader, writer = self._connection = self._connection or await self._connect()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._address}\r\nContent-Length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        first, events, last = 0.0, 0, b""
        # The last chunk of a body has no bytes.
        while (line := await reader.readline()) != b"0\r\n":
            if not line:
                raise SystemExit("the gateway closed the connection")
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - start
                events += 1
                last = line
        await reader.readline()
        usage: Any = json.loads(last.removeprefix(b"data: ")).get("usage")
        if usage is None:
            raise SystemExit(f"the gateway answered {last.decode()}")
        return Stream(first, time.perf_counter() - start, usage["completion_tokens"], events)

    async def close(self) -> None:
        if self._connection is not None:
            self._connection[1].close()
            await self._connection[1].wait_closed()
            self._connection = None

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self._address.partition(":")
        return await asyncio.open_connection(host, int(port))


class Paths:
    """Ways to the same version.

    Args:
        ensemble: a client of the server.
        gateway: host:port.
    """

    def __init__(self, ensemble: grpcclient.InferenceServerClient, gateway: str) -> None:
        self._ensemble = ensemble
        self._gateway = gateway
        self._kept = GatewayClient(gateway)

    async def connect(self) -> None:
        """Open again what was not used for a while."""
        await self._kept.close()
        await self._kept.connect()

    async def close(self) -> None:
        await self._kept.close()
        await self._ensemble.close()

    async def first_tokens(self, turn: int, prompt: str) -> dict[str, float]:
        """Seconds to the first token of one request on each path, one after the other."""
        singles = list(SINGLES)
        found = {}
        for path in singles[turn % len(singles) :] + singles[: turn % len(singles)]:
            if path == "ensemble":
                found[path] = (await self._through_ensemble(prompt, 4)).first_token
            elif path == "gateway":
                found[path] = (await self._kept.stream(prompt, 4)).first_token
            else:
                found[path] = (await self._through_gateway(prompt, 4)).first_token
        return found

    async def tokens_per_second(self, path: str, prompts: list[str], tokens: int) -> float:
        """All prompts at once, each on a stream of its own."""
        through = self._through_ensemble if path == "ensemble" else self._through_gateway
        start = time.perf_counter()
        streams = await asyncio.gather(*(through(prompt, tokens) for prompt in prompts))
        seconds = time.perf_counter() - start
        found = sum(stream.tokens for stream in streams)
        if found != len(prompts) * tokens:
            raise SystemExit(f"{path}: {found} tokens came, {len(prompts) * tokens} were asked for")
        return found / seconds

    async def _through_gateway(self, prompt: str, tokens: int) -> Stream:
        client = GatewayClient(self._gateway)
        try:
            return await client.stream(prompt, tokens)
        finally:
            await client.close()

    async def _through_ensemble(self, prompt: str, tokens: int) -> Stream:
        target = {"model_name": "deepseek", "model_version": "", "parameters": {"version": VERSION}}
        return await one(self._ensemble, {"inputs": inputs(prompt, tokens), **target})


async def measure(server: RunningServer, args: argparse.Namespace) -> dict[str, Any]:
    """First tokens of every turn by path, in seconds, and tokens a second of every round by path.

    One round goes before those that count.
    """
    paths = Paths(grpcclient.InferenceServerClient(server.grpc), server.gateway)
    firsts: dict[str, list[float]] = {path: [] for path in SINGLES}
    rates: dict[str, list[float]] = {path: [] for path in CROWDS}
    for turn in range(args.rounds + 1):
        await paths.connect()
        for number in range(args.singles):
            # All paths get the same prompt, which is too short for a block of the prefix cache.
            found = await paths.first_tokens(number, f"# {turn} {number}\n")
            for path, seconds in found.items() if turn else ():
                firsts[path].append(seconds)
        for path, kept in rates.items():
            # Prompts differ, so that neither path finds the other's blocks in the prefix cache.
            prompts = [f"# {path} {turn} {index}\ndef fibonacci(n):\n" for index in range(args.streams)]
            rate = await paths.tokens_per_second(path, prompts, args.tokens)
            if turn:
                kept.append(rate)
    await paths.close()
    return {"first_tokens": firsts, "tokens_per_second": rates}


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Medians by path, and what the gateway adds, in milliseconds, and its share of the ensemble's tokens a second."""
    firsts, rates = found["first_tokens"], found["tokens_per_second"]
    added = {}
    for path in SINGLES[1:]:
        differences = [1000 * (a - b) for a, b in zip(firsts[path], firsts["ensemble"], strict=True)]
        low, median, high = statistics.quantiles(differences, n=4)
        added[path] = {"median_ms": median, "quartiles_ms": [low, high]}
    medians = {path: statistics.median(rate) for path, rate in rates.items()}
    return {
        "first_token_ms": {path: 1000 * statistics.median(seconds) for path, seconds in firsts.items()},
        "added": added,
        "tokens_per_second": medians,
        "share": medians["gateway"] / medians["ensemble"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--singles", type=int, default=40, help="turns of single requests a round")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    load = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="piccard-bench-") as folder:
        home = Path(folder) / "home"
        subprocess.run([sys.executable, "-m", "piccard", "init", str(home)], check=True, stdout=subprocess.DEVNULL)
        server = RunningServer(home, "--gateway", threads=None)
        try:
            server.wait_ready(STARTUP)
            found = asyncio.run(measure(server, args))
        finally:
            server.stop()
    told = summary(found)
    for path, milliseconds in told["first_token_ms"].items():
        print(f"{path:24} {milliseconds:8.1f} ms to the first token")
    for path, added in told["added"].items():
        low, high = added["quartiles_ms"]
        print(f"{path:24} adds {added['median_ms']:.1f} ms (quartiles {low:.1f} and {high:.1f}; target 3)")
    for path, rate in told["tokens_per_second"].items():
        print(f"{path:24} {rate:8.1f} tokens/s")
    print(f"the gateway carries {told['share']:.2f} x the ensemble (target 0.9)")
    RESULTS.mkdir(exist_ok=True)
    machine = {"cpus": os.cpu_count(), "load_average_before": load, "load_average_after": os.getloadavg()}
    result = {"settings": vars(args), **machine, **told, "rounds": found}
    (RESULTS / "gateway.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
