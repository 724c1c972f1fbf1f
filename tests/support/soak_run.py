"""A server under full load for minutes, with clients among the others that do what none should."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from footprint import Footprint, footprint
from growth import PER_REQUEST, Growth, growths
from piccard_server import RunningServer, wait_for
from short_calls import answers_gateway, served_by
from soak_requests import ABNORMAL, NORMAL, WHOLE

LOAD = Path(__file__).with_name("soak_locust.py")
WORKER = Path(__file__).with_name("soak_worker.py")

# Seconds beyond its time that the load gets for requests that are under way, and for its own start and end.
STOP = 120
SLACK = 60.0

# Of the normal requests, how many have to be answered whole: a service that refuses all of them loses none.
WHOLE_SHARE = 0.95

# What a request may leave, as `growth.PER_REQUEST`. tritonserver's heap, with some 200 threads, comes to rest only
# after tens of thousands of requests, for which benchmarks/leaks.py has its bound; until then it takes steps, of 1 to
# 3 KiB a request in these minutes.
PER_SOAK = {**PER_REQUEST, "resident MiB of tritonserver": 4 / 2**10}

# Owners that answer, as sections name them.
OWNERS = ("version-1", "version-2", "router", "router_unary", "admission")


@dataclass
class Soak:
    """What came of a soak.

    Attributes:
        seconds: of load.
        warm_up: seconds at its beginning that do not count for growth.
        load: what Locust kept: requests by name, with their outcomes, and faults.
        samples: (seconds since its beginning, requests that were over, what the server took).
        wrong: everything that is not as it should be, in words.
    """

    seconds: float
    warm_up: float
    load: dict[str, Any] = field(default_factory=dict)
    samples: list[tuple[float, int, Footprint]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def warm(self) -> list[tuple[float, int, Footprint]]:
        """The samples past the warm-up."""
        return [sample for sample in self.samples if sample[0] >= self.warm_up]

    def growths(self) -> list[Growth]:
        """How every series went on past the warm-up, over the requests."""
        return growths([(at, sample) for _, at, sample in self.warm], PER_SOAK)

    def counts(self, names: tuple[Callable[..., str], ...]) -> Counter[str]:
        """Outcomes of the requests of these names."""
        found: Counter[str] = Counter()
        for name in dict.fromkeys(names):
            found.update(self.load["requests"].get(name.__name__, {}).get("outcomes", {}))
        return found

    def as_json(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "warm_up": self.warm_up,
            "load": self.load,
            "growth": [asdict(item) | {"rise": item.rise, "grew": item.grew} for item in self.growths()],
            "samples": [
                {"seconds": round(seconds, 1), "requests": at, **{name: round(v, 3) for name, v in sample.items()}}
                for seconds, at, sample in self.samples
            ],
            "wrong": self.wrong,
        }


def soak(
    server: RunningServer,
    *,
    seconds: float,
    warm_up: float,
    users: int,
    every: float = 5.0,
    tell: Callable[[str], None] = lambda line: None,
) -> Soak:
    """Load a server with its gateway, and look at it until nothing runs any more.

    Args:
        server: of two versions of the demo checkpoint, ready.
        seconds: of load.
        warm_up: seconds of it after which nothing may grow.
        users: requests at once.
        every: seconds between two samples.
    """
    found = Soak(seconds, warm_up)
    before = {owner: server.pid(owner) for owner in OWNERS} | {"tritonserver": server.server_pid()}
    with tempfile.TemporaryDirectory(prefix="piccard-soak-") as folder:
        load = _Load(server, Path(folder), seconds, users)
        begun = time.monotonic()
        try:
            while load.running and time.monotonic() - begun < seconds:
                found.samples.append((time.monotonic() - begun, _over(server), footprint(server)))
                tell(f"{found.samples[-1][0]:5.0f} s, {found.samples[-1][1]} requests")
                time.sleep(every)
            found.load = load.result()
        finally:
            load.end()
    found.wrong += _lost(found) + _left(server) + _changed(server, before)
    return found


class _Load:
    """Locust, and the worker that it sends its requests over gRPC with.

    Args:
        folder: for what they write.
    """

    def __init__(self, server: RunningServer, folder: Path, seconds: float, users: int) -> None:
        self._result, self._output = folder / "result.json", folder / "output"
        worker = folder / "worker"
        python = os.environ | {"PYTHONPATH": str(LOAD.parent)}
        self._log = open(self._output, "wb")  # noqa: SIM115 - it is both processes' until `end`
        self._worker = subprocess.Popen(
            [sys.executable, str(WORKER), str(worker), server.grpc, server.gateway],
            stdout=self._log,
            stderr=self._log,
            env=python,
        )
        wait_for(worker.exists, 60, "the worker")
        environment = {
            "SOAK_GRPC": server.grpc,
            "SOAK_GATEWAY": server.gateway,
            "SOAK_WORKER": str(worker),
            "SOAK_RESULT": str(self._result),
        }
        options = [f"--users={users}", f"--spawn-rate={users}", f"--run-time={seconds:g}s", f"--stop-timeout={STOP}"]
        self._locust = subprocess.Popen(
            [sys.executable, "-m", "locust", f"--locustfile={LOAD}", "--headless", "--only-summary", *options],
            stdout=self._log,
            stderr=self._log,
            env=python | environment,
        )
        self._seconds = seconds

    @property
    def running(self) -> bool:
        return self._locust.poll() is None

    def result(self) -> dict[str, Any]:
        """What came of it, once all requests are over; fails the test where that is never."""
        try:
            code = self._locust.wait(STOP + SLACK)
        except subprocess.TimeoutExpired:
            code = None
        if code not in (0, 1) or not self._result.exists():
            raise AssertionError(f"Locust ended with {code}; it printed:\n{self._output.read_text()[-4000:]}")
        result: dict[str, Any] = json.loads(self._result.read_text())
        return result

    def end(self) -> None:
        for process in (self._locust, self._worker):
            process.kill()
            process.wait()
        self._log.close()


def _over(server: RunningServer) -> int:
    """Requests that were answered so far, whole or not."""
    return int(server.metric("piccard_requests_total"))


def _lost(found: Soak) -> list[str]:
    """Requests without an end or with a wrong one, and kinds that were never sent."""
    load = found.load
    wrong = list(load["faults"])
    ended = sum(sum(entry["outcomes"].values()) for entry in load["requests"].values())
    if ended != load["begun"]:
        wrong.append(f"{load['begun']} requests were begun and {ended} ended")
    wrong += [f"no request {send.__name__} was sent" for send in (*NORMAL, *ABNORMAL) if not found.counts((send,))]
    normal = found.counts(NORMAL)
    if normal[WHOLE] < WHOLE_SHARE * normal.total():
        wrong.append(f"of {normal.total()} normal requests {normal[WHOLE]} were answered whole: {dict(normal)}")
    return wrong


def _left(server: RunningServer) -> list[str]:
    """What of the load is still there, and whether the service answers without it."""
    wrong = []
    try:
        wait_for(lambda: not _busy(server), 60, "the end of every generation")
    except AssertionError as error:
        wrong.append(f"{error}: {_busy(server)}")
    status, body = server.get("readyz")
    if status != 200:
        wrong.append(f"/readyz says {status}: {body}")
    if not answers_gateway(server):
        wrong.append("the gateway's /health does not say yes")
    wrong += [f"version {n} does not answer" for n, asked in ((1, False), (2, True)) if _server_of(server, asked) != n]
    return wrong + [f"doctor: {finding['problem']}" for finding in server.problems()]


def _server_of(server: RunningServer, canary: bool) -> int:
    return served_by(server, canary=canary)


def _busy(server: RunningServer) -> dict[str, Any]:
    """Owner -> what it has in its hands; of a version also blocks that nobody gave back."""
    found: dict[str, Any] = {}
    for owner in OWNERS:
        report = server.report(owner)
        left = report.get("running", 0) + report.get("waiting", 0) + sum(report.get("in_flight", {}).values())
        blocks = report.get("total_blocks", 0) - report.get("free_blocks", 0)
        if left or blocks:
            found[owner] = {"requests": left, "blocks": blocks}
    return found


def _changed(server: RunningServer, before: dict[str, int]) -> list[str]:
    """Processes that are not those from before."""
    after = {owner: server.pid(owner) for owner in OWNERS} | {"tritonserver": server.server_pid()}
    wrong = [f"{owner} is another process than before" for owner, pid in before.items() if after[owner] != pid]
    revived = server.report("supervisor")["revivals"]
    return wrong + [f"revived: {revived}"] * bool(sum(revived.values()))
