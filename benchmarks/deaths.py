"""How soon a service answers again after a kill -9 of each of its processes, and what a dying canary takes along.

First deaths: on a fresh server a round, each process is killed once, and from then on a new request begins every
25 ms, each on a connection of its own. What counts is the first of them that is answered, and the first that the killed
version answers itself. A kill that took the whole tritonserver along is told apart and not part of the median.

Canaries in mid-stream: streams that are really sending when their version is killed, again and again. Counted are
those that end whole with the expected text, and how often the whole tritonserver died.

Prints the figures and keeps them in results/deaths.json. Versions are scripted.

    python benchmarks/deaths.py --rounds 5 --kills 20
"""

import argparse
import http.client
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from callers import CALLERS, Call
from piccard.canary import canary_set
from piccard.operation import operation
from piccard_contract.home import version_owner
from piccard_server import RunningServer, make_scripted_home, runs, wait_for
from running_stream import RunningStream

RESULTS = Path(__file__).parent / "results"

PROBE_EVERY = 0.025
PATIENCE = 120.0

# Nothing but a death ends a stream or a request.
NEVER = {"first_token": 600.0, "between_tokens": 600.0}

STREAMS = 16
TOKENS = 80
DELAY = 0.05
WORDS = " ".join(f"w{n}" for n in range(TOKENS))
# Tokens that every stream has sent when its version is killed.
SENT = 10

# Canaries of one server, killed in turn: each waits out the pause before its next start while the others are killed.
CANARIES = (2, 3, 4, 5, 6)


@dataclass(frozen=True)
class Target:
    """A process to kill.

    Attributes:
        entry: of callers.CALLERS; where the requests that follow go.
        canary: what their X-Canary says; empty is without.
        version: that answers again once it was started anew.
    """

    name: str
    owner: str
    entry: str = "generate_stream"
    canary: str = ""
    version: int | None = None


# tritonserver last: all others die with it.
TARGETS = (
    Target("canary", version_owner(2), canary="true", version=2),
    Target("stable, fallback both", version_owner(1), version=1),
    Target("admission", "admission"),
    Target("router", "router"),
    Target("router_unary", "router_unary", entry="http_infer"),
    Target("supervisor", "supervisor"),
    Target("tritonserver", "tritonserver"),
)


@dataclass
class Probes:
    """Requests that begin every `PROBE_EVERY` seconds until one that counts is answered.

    Attributes:
        answered: seconds from the kill to each answer, and the version that gave it.
    """

    server: RunningServer
    target: Target
    killed: float
    answered: list[tuple[float, int]] = field(default_factory=list)

    def until_back(self) -> tuple[float, float | None]:
        """Seconds to the first answer, and to the first one of the target's own version."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            threading.Thread(target=self._ask, daemon=True).start()
            time.sleep(PROBE_EVERY)
            answered = sorted(self.answered)
            own = [at for at, version in answered if version == self.target.version]
            if answered and (own or self.target.version is None):
                return answered[0][0], own[0] if own else None
        raise SystemExit(f"no answer within {PATIENCE:g} s after {self.target.name} was killed")

    def _ask(self) -> None:
        caller = CALLERS[self.target.entry](self.server)  # type: ignore[call-arg]
        parameters = {"x-canary": self.target.canary} if self.target.canary else {}
        try:
            told = caller.call(Call({"text_input": "one", "sampling_parameters": {"max_tokens": 1}}, parameters))
        # The refusals and broken connections of a server that is dead.
        except (OSError, http.client.HTTPException, ValueError):
            return
        if told.error is None and told.responses:
            self.answered.append((time.monotonic() - self.killed, told.versions[0]))


@contextmanager
def scripted_server(**settings: Any) -> Iterator[RunningServer]:
    """A server over a home of its own."""
    with tempfile.TemporaryDirectory(prefix="piccard-bench-") as folder:
        service = make_scripted_home(Path(folder) / "home", deadlines=NEVER, traffic_ratio=0.0, **settings)
        server = RunningServer(service.home)
        try:
            yield server.wait_ready()
        finally:
            server.stop()


def first_deaths(rounds: int) -> dict[str, Any]:
    """Kill each process once on a fresh server, `rounds` times."""
    measured: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    took_along: dict[str, int] = defaultdict(int)
    for _ in range(rounds):
        with scripted_server(fallback_policy="both") as server:
            for target in TARGETS:
                tritonserver = server.server_pid()
                first, own = _kill(server, target)
                if target.name == "supervisor":
                    begun = time.monotonic()
                    server.serve_again()
                    server.wait_ready()
                    measured[target.name]["next_supervisor_ready"].append(time.monotonic() - begun)
                server.wait_ready()
                if target.name != "tritonserver" and not (runs(tritonserver) and server.server_pid() == tritonserver):
                    took_along[target.name] += 1
                    continue
                measured[target.name]["first_answer"].append(first)
                if own is not None:
                    measured[target.name]["first_answer_of_its_own"].append(own)
                print(f"{target.name}: {first:.2f} s, itself {own and round(own, 2)}", flush=True)
    return {
        target.name: {name: figures(values) for name, values in measured[target.name].items()}
        | {"killed_tritonserver_too": took_along[target.name]}
        for target in TARGETS
    }


def _kill(server: RunningServer, target: Target) -> tuple[float, float | None]:
    pid = server.server_pid() if target.name == "tritonserver" else server.pid(target.owner)
    killed = time.monotonic()
    if target.name == "supervisor":
        # Its parent, which this process is, has to wait for it.
        server.kill_supervisor()
    else:
        os.kill(pid, signal.SIGKILL)
    return Probes(server, target, killed).until_back()


@dataclass
class Toll:
    """What came of kills in mid-stream.

    Attributes:
        whole, resumed: streams that ended well, and those of them that two versions served.
        broken: the others, where tritonserver lived on.
        lost: the others, where it died.
        server_deaths: kills that tritonserver did not survive.
        faults: of broken streams, in words.
    """

    kills: int = 0
    streams: int = 0
    whole: int = 0
    resumed: int = 0
    broken: int = 0
    lost: int = 0
    server_deaths: int = 0
    faults: list[str] = field(default_factory=list)


def kills_in_mid_stream(kills: int) -> Toll:
    """Kill canaries under streams that send, on a fresh server after each death of tritonserver."""
    toll = Toll()
    while toll.kills < kills:
        with scripted_server(versions=max(CANARIES), fallback_policy="canary_to_stable") as server:
            lives = True
            while lives and toll.kills < kills:
                lives = _kill_sending(server, CANARIES[toll.kills % len(CANARIES)], toll)
            server.wait_ready()
    return toll


def _kill_sending(server: RunningServer, canary: int, toll: Toll) -> bool:
    """One kill; whether tritonserver lives on."""
    wait_for(server.loaded_all, PATIENCE, "every version")
    with operation(server.home, server.service.name, tell=lambda _: None) as op:
        canary_set(op, canary, 0.0)
    # A router takes the new policy in a moment; until then X-Canary means the last one.
    wait_for(lambda: _serves_canaries(server, canary), PATIENCE, f"version {canary} to be the canary")
    tritonserver = server.server_pid()
    streams = [
        RunningStream(
            server.grpc,
            server.service.ensemble,
            headers={"x-canary": "true"},
            text_input=WORDS,
            sampling_parameters={"max_tokens": TOKENS},
            extensions={"script": {"tokens": TOKENS, "delay_s": DELAY}},
        )
        for _ in range(STREAMS)
    ]
    wait_for(lambda: all(len(stream.token_ids) >= SENT for stream in streams), PATIENCE, "the streams to send")
    if not all(stream.running for stream in streams):
        raise SystemExit("a stream was over before the kill: this machine is too busy for so short an answer")
    os.kill(server.pid(version_owner(canary)), signal.SIGKILL)
    for stream in streams:
        stream.wait()
    whole = [stream for stream in streams if _whole(stream)]
    # A server that died may still seem to run while the last of its streams end.
    wait_for(lambda: server.version_ready(canary) or not runs(tritonserver), PATIENCE, "the canary")
    lives = runs(tritonserver) and server.server_pid() == tritonserver
    toll.kills += 1
    toll.streams += len(streams)
    toll.whole += len(whole)
    toll.resumed += sum(stream.versions == {1, canary} for stream in whole)
    toll.broken += (len(streams) - len(whole)) * lives
    toll.lost += (len(streams) - len(whole)) * (not lives)
    toll.server_deaths += not lives
    if lives:
        toll.faults += [str(stream.error or stream.text) for stream in streams if stream not in whole]
    print(f"kill {toll.kills}: {len(whole)} of {len(streams)} whole, server {'lives' if lives else 'died'}", flush=True)
    return lives


def _serves_canaries(server: RunningServer, canary: int) -> bool:
    stream = RunningStream(
        server.grpc,
        server.service.ensemble,
        headers={"x-canary": "true"},
        text_input="one",
        sampling_parameters={"max_tokens": 1},
    ).wait()
    return stream.error is None and stream.versions == {canary}


def _whole(stream: RunningStream) -> bool:
    return stream.error is None and stream.status == "OK" and stream.text.split() == WORDS.split()


def figures(seconds: list[float]) -> dict[str, Any]:
    """Median and range in seconds."""
    return {
        "median_s": round(statistics.median(seconds), 3),
        "least_s": round(min(seconds), 3),
        "most_s": round(max(seconds), 3),
        "times": len(seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of first deaths")
    parser.add_argument("--kills", type=int, default=20, help="of canaries in mid-stream")
    args = parser.parse_args()
    result: dict[str, Any] = {"settings": vars(args), "cpus": os.cpu_count(), "load_average": [os.getloadavg()[0]]}
    result["first_deaths"] = first_deaths(args.rounds)
    result["load_average"].append(os.getloadavg()[0])
    _keep(result)
    toll = kills_in_mid_stream(args.kills)
    result["in_mid_stream"] = vars(toll) | {"streams_at_once": STREAMS, "tokens_per_second_each": round(1 / DELAY)}
    result["load_average"].append(os.getloadavg()[0])
    _keep(result)
    print(json.dumps(result, indent=1))


def _keep(result: dict[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "deaths.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
