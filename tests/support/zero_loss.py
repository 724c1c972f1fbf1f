"""Requests of every kind while two operators change the versions of a service: every one has to come out whole."""

import json
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from callers import CALLERS, Caller
from piccard.errors import OperationError
from piccard.operation import Operation, operation
from piccard.promote import promote
from piccard.repository import configured_versions, stable_target
from piccard.rollback import rollback
from piccard.server_log import server_log
from piccard_contract.home import version_owner
from piccard_contract.lifecycle import VersionState
from piccard_server import RunningServer, wait_for
from request_mix import RequestMix, ScriptedRequest

# Seconds between tokens: most requests are waiting at any time, so that the operators get on on two cores too.
DELAY = 0.015

# One request in so many runs for more than a second, through whatever changes meanwhile.
LONG_EVERY = 20
LONG_TOKENS = 80

# Requests that end between two commands of an operator, so that each change meets traffic.
BETWEEN = 8

STREAMING = ("grpc_stream", "generate_stream")
UNARY = ("grpc_unary", "http_infer")

# Requests that the canary has in its hands when it is killed.
AT_DEATH = 3

# How often an operator tries a command that the other one's lock refuses.
TRIES = 20

_SERVES = re.compile(r"server_model: version ([0-9]+) \(")


@dataclass
class Outcome:
    """What came of a run.

    Attributes:
        requests: by entry point.
        served: requests by the version that ended them.
        resumed: requests that more than one version answered.
        faults: what was wrong with a request, in words; empty after a run without loss.
        waited: longest that a command took, in seconds.
        refused: commands that the lock of the other operator refused, and that were given again.
        initialisations: times that each version's process was started.
    """

    requests: dict[str, int] = field(default_factory=dict)
    served: dict[int, int] = field(default_factory=dict)
    resumed: int = 0
    faults: list[str] = field(default_factory=list)
    cycles: int = 0
    publications: int = 0
    kills: int = 0
    revivals: int = 0
    refused: int = 0
    waited: float = 0.0
    seconds: float = 0.0
    initialisations: dict[int, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.requests.values())

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Traffic:
    """Workers that send one request after the other, each over a kept connection of one entry point.

    Args:
        streams, unary: how many of them stream, and how many ask for a single answer.
        delay: seconds between tokens.
    """

    def __init__(self, server: RunningServer, *, streams: int, unary: int, delay: float = DELAY) -> None:
        self.requests: Counter[str] = Counter()
        self.served: Counter[int] = Counter()
        self.resumed = 0
        self.faults: list[str] = []
        self._server = server
        self._numbers = count()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._delay = delay
        entries = [STREAMING[n % len(STREAMING)] for n in range(streams)]
        entries += [UNARY[n % len(UNARY)] for n in range(unary)]
        self._threads = [
            threading.Thread(target=self._work, args=(entry, seed), daemon=True) for seed, entry in enumerate(entries)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def total(self) -> int:
        return sum(self.requests.values())

    def go_on(self, requests: int = BETWEEN) -> None:
        """Wait until so many more requests are over."""
        wanted = self.total + requests
        wait_for(lambda: self.total >= wanted, 300, "more requests")

    def end(self) -> None:
        """Let every request finish that was begun."""
        self._over.set()
        for thread in self._threads:
            thread.join(120)
            if thread.is_alive():
                self.faults.append("a request was not over after 120 s")

    def _work(self, entry: str, seed: int) -> None:
        caller: Caller = CALLERS[entry](self._server)  # type: ignore[call-arg]
        mix = RequestMix(seed)
        while not self._over.is_set():
            with self._lock:
                number = next(self._numbers)
            request = mix.make(number, delay=self._delay)
            if number % LONG_EVERY == 0:
                request = ScriptedRequest(number, LONG_TOKENS, delay=self._delay)
            try:
                told = caller.call(request.call)
                faults = request.faults(told)
            except Exception as error:
                told, faults = None, [f"{error!r}"]
                caller = CALLERS[entry](self._server)  # type: ignore[call-arg]
            with self._lock:
                self.requests[entry] += 1
                self.faults += [f"{entry} {number}: {fault}" for fault in faults]
                if told is not None and told.responses:
                    self.served[told.versions[-1]] += 1
                    self.resumed += "route" in told.details
        caller.close()


class Operator:
    """Somebody who gives commands, again where the other's lock refuses one."""

    def __init__(self, server: RunningServer) -> None:
        self.refused = 0
        self.waited = 0.0
        self.failures: list[str] = []
        self._server = server

    def start(self, work: Callable[[], None]) -> threading.Thread:
        """Do `work` in the background; what it raises is kept."""

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self.failures.append(f"operator: {error!r}")

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def here(self, command: Callable[[Operation], Any]) -> None:
        """A command within this process."""

        def run() -> str:
            try:
                with operation(self._server.home, self._server.service.name, tell=lambda _: None) as op:
                    command(op)
            except OperationError as error:
                return str(error)
            return ""

        self._until_done(run)

    def shell(self, *arguments: str) -> str:
        """A command as a process of its own; what it printed."""
        printed = ""

        def run() -> str:
            nonlocal printed
            result = self._server.piccard(*arguments, check=False)
            printed = result.stdout
            return result.stderr or result.stdout if result.returncode else ""

        self._until_done(run)
        return printed

    def _until_done(self, run: Callable[[], str]) -> None:
        begun = time.monotonic()
        for _ in range(TRIES):
            refusal = run()
            self.waited = max(self.waited, time.monotonic() - begun)
            if not refusal:
                return
            # The one refusal that there may be: both operators do what the other leaves possible.
            if "another process is" not in refusal:
                raise AssertionError(refusal)
            self.refused += 1
        raise AssertionError(f"refused {TRIES} times")


def run_without_loss(
    server: RunningServer,
    *,
    streams: int = 16,
    unary: int = 4,
    requests: int = 2000,
    cycles: int = 20,
    publications: int = 5,
    kills: int = 0,
    delay: float = DELAY,
) -> Outcome:
    """Run traffic while one operator promotes and rolls back, or kills, and another publishes and retires.

    Args:
        server: of scripted versions 1 (stable) and 2 (canary).
        streams, unary: requests at once.
        requests: at least so many.
        cycles: of promote and rollback.
        publications: each with a canary's share of the traffic unless the canary is killed, and then retired.
        kills: of the canary, each with requests in its hands; version 2 has to stay it, so without cycles.
        delay: seconds between tokens.
    """
    assert not (kills and cycles)
    started = time.monotonic()
    before = initialisations(server)
    traffic = Traffic(server, streams=streams, unary=unary, delay=delay)
    first, second = Operator(server), Operator(server)
    threads = [
        first.start(lambda: _kill_the_canary(server, traffic, kills) if kills else _cycle(first, traffic, cycles)),
        second.start(lambda: _publish_and_retire(second, server, traffic, publications, shared=not kills)),
    ]
    for thread in threads:
        thread.join(900)
    try:
        wait_for(lambda: traffic.total >= requests or traffic.faults, 600, f"{requests} requests")
    finally:
        traffic.end()
    after = initialisations(server)
    outcome = Outcome(
        dict(traffic.requests),
        dict(sorted(traffic.served.items())),
        traffic.resumed,
        traffic.faults + first.failures + second.failures,
        cycles,
        publications,
        kills,
        revivals(server),
        first.refused + second.refused,
        round(max(first.waited, second.waited), 2),
        round(time.monotonic() - started, 1),
        {version: times - before.get(version, 0) for version, times in after.items()},
    )
    outcome.faults += [f"a thread of an operator still runs: {t.name}" for t in threads if t.is_alive()]
    return outcome


def _cycle(operator: Operator, traffic: Traffic, cycles: int) -> None:
    for _ in range(cycles):
        operator.here(lambda op: promote(op, 2))
        traffic.go_on()
        operator.here(rollback)
        traffic.go_on()


def _kill_the_canary(server: RunningServer, traffic: Traffic, kills: int) -> None:
    for number in range(1, kills + 1):
        wait_for(lambda: _running(server, 2) >= AT_DEATH, 120, "requests of the canary")
        os.kill(server.pid(version_owner(2)), signal.SIGKILL)
        wait_for(lambda number=number: revivals(server) == number, 120, "the canary's revival")  # type: ignore[misc]
        wait_for(lambda: server.version_ready(2), 120, "the canary")
        traffic.go_on()


def _running(server: RunningServer, version: int) -> int:
    section = server.section(version_owner(version))
    return int(section.data["running"]) if section is not None and section.alive else 0


def _publish_and_retire(
    operator: Operator, server: RunningServer, traffic: Traffic, publications: int, *, shared: bool
) -> None:
    for _ in range(publications):
        label = f"v{server.state().next_version}"
        told = operator.shell("publish", "scripted", "--runner=scripted", f"--label={label}", "--json")
        number = str(json.loads(told)["after"]["version"])
        if shared:
            operator.shell("canary", "set", f"--version={number}", "--ratio=0.5")
        traffic.go_on()
        if shared:
            operator.shell("canary", "off")
        operator.shell("retire", number, "--wait=120")


def initialisations(server: RunningServer) -> dict[int, int]:
    """How often each version's process was started, by the server's log, which outlives every process."""
    text = server_log(server.home).read_text(encoding="utf-8", errors="replace")
    return dict(sorted(Counter(int(number) for number in _SERVES.findall(text)).items()))


def revivals(server: RunningServer) -> int:
    """Processes that the supervisor started again."""
    return sum(server.report("supervisor")["revivals"].values())


def audited(server: RunningServer) -> Counter[str]:
    """Commands in the audit log by their first word, those that failed under `failed`."""
    lines = [json.loads(line) for line in Path(server.service.audit_log).read_text(encoding="utf-8").splitlines()]
    return Counter("failed" if "failed" in line else line["what"].split()[0] for line in lines)


def disagreements(server: RunningServer) -> list[str]:
    """Where state, link, configuration and what is loaded differ; empty where they agree."""
    state = server.state()
    found = []
    if not state.stable == stable_target(server.service) == (configured_versions(server.service) or [None])[0]:
        found.append(f"stable is {state.stable}, the link names {stable_target(server.service)}")
    with server.control() as control:
        loaded = control.ready_versions(server.service.llm)
    if loaded != state.loaded():
        found.append(f"loaded are {loaded}, the state names {state.loaded()}")
    found += [f"version {n} is {r.state}" for n, r in state.versions.items() if r.state is VersionState.FAILED]
    return found + [finding["problem"] for finding in server.problems()]
