"""What shadow mode costs clients: the same streams with every request mirrored, and with none, in one run.

Starts a server with two scripted versions, which take no processor time for their tokens: what is left is the router's
and the server's work for answers that nobody hears. Rounds alternate between both; figures are medians over the rounds
of medians over streams.

    python benchmarks/shadow.py --streams 8 --tokens 50 --rounds 6
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from piccard.policy_store import update_policy
from piccard_server import RunningServer, make_scripted_home, wait_for
from triton_calls import GrpcStream

RESULTS = Path(__file__).parent / "results"

# Seconds between two tokens of a version.
DELAY = 0.02


def stream(server: RunningServer, tokens: int) -> tuple[float, float]:
    """Seconds to the first token of one stream, and between two on average."""
    script = {"tokens": tokens, "delay_s": DELAY, "first_delay_s": DELAY}
    with GrpcStream(server.grpc) as calls:
        began = time.perf_counter()
        calls.send(
            server.service.ensemble,
            text_input="a b c",
            stream=True,
            sampling_parameters={"max_tokens": tokens},
            extensions={"script": script},
        )
        first, final = 0.0, False
        while not final:
            _, final = calls.next()
            first = first or time.perf_counter() - began
        return first, (time.perf_counter() - began - first) / (tokens - 1)


def measured(server: RunningServer, streams: int, tokens: int) -> tuple[float, float]:
    """Medians of both over concurrent streams."""
    with ThreadPoolExecutor(streams) as pool:
        found = list(pool.map(lambda _: stream(server, tokens), range(streams)))
    return statistics.median(one[0] for one in found), statistics.median(one[1] for one in found)


def pairs(server: RunningServer) -> int:
    """Requests that both versions answered so far, as the router of streams reports."""
    told: dict[str, Any] = server.report("router")["shadows"]
    return int(told.get("2", {"pairs": 0})["pairs"])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--streams", type=int, default=8)
    arguments.add_argument("--tokens", type=int, default=50)
    arguments.add_argument("--rounds", type=int, default=6)
    given = arguments.parse_args()
    rounds: dict[float, list[tuple[float, float]]] = {0.0: [], 1.0: []}
    with tempfile.TemporaryDirectory(prefix="piccard-bench-") as folder:
        service = make_scripted_home(Path(folder) / "home", traffic_ratio=0.0)
        server = RunningServer(service.home)
        try:
            server.wait_ready()
            measured(server, given.streams, given.tokens)
            for _ in range(given.rounds):
                for ratio, found in rounds.items():
                    update_policy(service, shadow={"ratio": ratio, "max_in_flight": given.streams})
                    found.append(measured(server, given.streams, given.tokens))
                    # Copies of this round do not run into the next one.
                    wait_for(lambda: server.in_flight(2) == 0, 60, "version 2 to be idle")
            wait_for(lambda: pairs(server) > 0, 60, "the router's report")
            mirrored = pairs(server)
        finally:
            server.stop()
    medians = {
        ratio: [statistics.median(one[index] for one in found) for index in range(2)] for ratio, found in rounds.items()
    }
    result = {
        "streams": given.streams,
        "tokens": given.tokens,
        "rounds": given.rounds,
        "pairs": mirrored,
        "first_token_s": {"alone": medians[0.0][0], "mirrored": medians[1.0][0]},
        "token_gap_s": {"alone": medians[0.0][1], "mirrored": medians[1.0][1]},
        "first_token_ratio": medians[1.0][0] / medians[0.0][0],
        "token_gap_ratio": medians[1.0][1] / medians[0.0][1],
    }
    print(json.dumps(result, indent=2))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "shadow.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
