"""How soon a running service follows: a promotion, a cancel by token, a client of a version or gateway that leaves.

One real server with two scripted versions, between which the link moves, and one of the demo checkpoint on the torch
runner, whose generations are ended. A client of the gateway goes away after its first event, and while its prompt of
3,000 tokens is read, before there is a token. All times are of this machine's clock:

- the link moved when the kernel says that it did (its inode's change time);
- an engine's abort lies between the version's last report in which it ran and the first one in which nothing runs and
  every block is free, each with the version's own time in it. Reports are up to 50 ms apart, so both bounds are kept.

Prints medians and maxima and keeps them in results/reactions.json.

    python benchmarks/reactions.py --switches 20 --aborts 20
"""

import argparse
import json
import os
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from callers import Call, GrpcStreamCaller, GrpcUnaryCaller
from piccard.home_init import init_home
from piccard.operation import operation
from piccard.policy_store import update_policy
from piccard.promote import promote
from piccard.rollback import rollback
from piccard_contract.home import version_owner
from piccard_contract.live_state import LiveState
from piccard_contract.version_file import VersionFile
from piccard_server import RunningServer, scripted_version, wait_for
from running_stream import RunningStream
from short_calls import answers_gateway
from triton_calls import GrpcStream, Outputs

RESULTS = Path(__file__).parent / "results"
DEMO = Path(__file__).parents[1] / "assets" / "demo"

DEMO_VERSION = 3
PROMPT = "def fibonacci(n):\n"
LONG = {"max_tokens": 3000, "temperature": 0, "ignore_eos": True}

# Seconds that a client of the steady stream waits between two requests.
PACE = 0.01
BETWEEN_SWITCHES = 0.5

# Tokens of a prompt that takes a while to be read.
LONG_PROMPT = 3000
POLL = 0.002


@dataclass(slots=True, frozen=True)
class Answer:
    """A request of the steady stream: Unix times of its sending and its first response, and who served it."""

    sent: float
    first: float
    version: int


class SteadyRequests:
    """Clients that send one short request after the other, each over a gRPC stream that it keeps."""

    def __init__(self, server: RunningServer, clients: int) -> None:
        self.answers: list[Answer] = []
        self.faults: list[str] = []
        self._server = server
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(90)

    def _run(self) -> None:
        caller = GrpcStreamCaller(self._server)
        while not self._over.wait(PACE):
            firsts: list[float] = []
            call = Call({"text_input": "one", "sampling_parameters": {"max_tokens": 1}}, on_first=_noted(firsts))
            sent = time.time()
            told = caller.call(call)
            if told.error is not None or not firsts:
                self.faults.append(told.error or "no response")
            else:
                self.answers.append(Answer(sent, firsts[0], told.versions[0]))
        caller.close()


def _noted(times: list[float]) -> Callable[[Outputs], object]:
    return lambda _: times.append(time.time())


def switches(server: RunningServer, count: int, clients: int) -> dict[str, Any]:
    """Promote version 2 and roll back, `count` commands in all: from each, when the new version first answered."""
    requests = SteadyRequests(server, clients)
    moved: list[tuple[float, float, int]] = []
    try:
        wait_for(lambda: len(requests.answers) >= 10 * clients, 60, "the first requests")
        for number in range(count):
            with operation(server.home, server.service.name, tell=lambda _: None) as op:
                target = 1 if number % 2 else 2
                if number == 0:
                    promote(op, 2)
                else:
                    rollback(op)
                returned = time.time()
            moved.append((os.lstat(server.service.stable_link).st_ctime_ns / 1e9, returned, target))
            time.sleep(BETWEEN_SWITCHES)
    finally:
        requests.end()
    answers = sorted(requests.answers, key=lambda answer: answer.first)
    from_link, from_return, gaps, late = [], [], [], []
    for (link, returned, target), (until, *_) in zip(moved, [*moved[1:], (float("inf"), 0.0, 0)], strict=True):
        after = [answer for answer in answers if link <= answer.first and answer.sent < until]
        new = next(answer for answer in after if answer.version == target)
        from_link.append(new.first - link)
        from_return.append(max(0.0, new.first - returned))
        gaps.append(returned - link)
        # One that was under way at the next move may rightly be served by either.
        whole = [answer for answer in after if answer.sent > link and answer.first < until]
        late += [answer.sent - link for answer in whole if answer.version != target]
    seconds = answers[-1].first - answers[0].first
    return {
        "commands": count,
        "requests": len(answers),
        "requests_per_second": round(len(answers) / seconds, 1),
        "request_ms": figures([answer.first - answer.sent for answer in answers]),
        "faults": requests.faults,
        "link_to_first_answer_ms": figures(from_link),
        "return_to_first_answer_ms": figures(from_return),
        "link_to_return_ms": figures(gaps),
        # The kernel's time of the move is up to one of its ticks (4 ms) too early.
        "sent_after_the_move_and_served_by_the_old_version": {"requests": len(late), "ms": figures(late or [0.0])},
    }


class AbortWatch:
    """Looks for the end of everything in a version, from when it is made; `found` waits for it."""

    def __init__(self, server: RunningServer, version: int) -> None:
        self._server = server
        self._owner = version_owner(version)
        self._bounds: tuple[float, float] | None = None
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def found(self) -> tuple[float, float]:
        """Unix times of the last report in which something ran and of the first one after it."""
        self._thread.join(60)
        if self._bounds is None:
            raise SystemExit(f"{self._owner} still runs after a minute")
        return self._bounds

    def _look(self) -> None:
        live = LiveState(self._server.service.live_state, self._server.service.run_folder)
        last = time.time()
        try:
            while (section := live.read(self._owner)) is not None:
                if is_idle(section.data):
                    self._bounds = last, section.updated_at
                    return
                last = section.updated_at
                time.sleep(POLL)
        finally:
            live.close()


def is_idle(report: dict[str, Any]) -> bool:
    return bool(report["running"] + report["waiting"] == 0 and report["free_blocks"] == report["total_blocks"])


def aborts(server: RunningServer, count: int, once: Callable[[RunningServer], tuple[float, float]]) -> dict[str, Any]:
    """Bounds of the time from the end of a client's wish to the engine's abort, `count` times."""
    least, most = [], []
    for _ in range(count):
        wait_for(lambda: is_idle(server.report(version_owner(DEMO_VERSION))), 60, "an idle version")
        low, high = once(server)
        least.append(max(0.0, low))
        most.append(high)
    return {"times": count, "at_least_ms": figures(least), "at_most_ms": figures(most)}


def cancel_by_token(server: RunningServer) -> tuple[float, float]:
    """A stream through the ensemble, cancelled by another client."""
    stream = RunningStream(
        server.grpc,
        server.service.ensemble,
        parameters={"version": DEMO_VERSION},
        text_input=PROMPT,
        sampling_parameters=LONG,
    ).wait_first()
    wait_for(lambda: server.report(version_owner(DEMO_VERSION))["running"] == 1, 60, "the report of it")
    caller = GrpcUnaryCaller(server)
    watch = AbortWatch(server, DEMO_VERSION)
    begun = time.time()
    told = caller.call(Call({"extensions": {"cancel": stream.responses[0]["cancel_token"][0]}}))
    low, high = watch.found()
    caller.close()
    stream.wait()
    if not told.details.get("cancelled"):
        raise SystemExit(f"the stream was over before its cancel came: {told}")
    return low - begun, high - begun


def leave_directly(server: RunningServer) -> tuple[float, float]:
    """A stream on the version itself, whose client goes away."""
    stream = GrpcStream(server.grpc)
    stream.send(server.service.llm, version=str(DEMO_VERSION), text_input=PROMPT, stream=True, sampling_parameters=LONG)
    stream.next()
    wait_for(lambda: server.report(version_owner(DEMO_VERSION))["running"] == 1, 60, "the report of it")
    watch = AbortWatch(server, DEMO_VERSION)
    begun = time.time()
    stream.cancel()
    low, high = watch.found()
    return low - begun, high - begun


def leave_gateway(server: RunningServer) -> tuple[float, float]:
    """A stream through the gateway, whose client closes its connection after the first event."""
    return _left_at_the_gateway(server, {"prompt": PROMPT, **LONG}, begun=True)


def leave_gateway_early(server: RunningServer) -> tuple[float, float]:
    """The same before there is a token, while a long prompt is read."""
    # Others every time, so that none is in the prefix cache.
    ids = random.choices(range(100, 2000), k=LONG_PROMPT)
    return _left_at_the_gateway(server, {"prompt": ids, "max_tokens": 64, "ignore_eos": True}, begun=False)


def _left_at_the_gateway(server: RunningServer, asked: dict[str, Any], *, begun: bool) -> tuple[float, float]:
    content = json.dumps({"model": "deepseek", "stream": True, "version": DEMO_VERSION, **asked}).encode()
    host, _, port = server.gateway.partition(":")
    connection = socket.create_connection((host, int(port)), 60)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {server.gateway}\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    if begun and not connection.recv(65536).startswith(b"HTTP/1.1 200"):
        raise SystemExit("the gateway refused the stream")
    wait_for(lambda: server.report(version_owner(DEMO_VERSION))["running"] == 1, 60, "the report of it")
    watch = AbortWatch(server, DEMO_VERSION)
    connection.setblocking(False)
    try:
        early = connection.recv(1) if not begun else b""
    except BlockingIOError:
        early = b""
    if early:
        raise SystemExit("the first token came before the client went away; take a longer prompt")
    left = time.time()
    connection.close()
    low, high = watch.found()
    return low - left, high - left


def figures(seconds: list[float]) -> dict[str, float]:
    """Median and maximum in milliseconds."""
    return {"median": round(1000 * statistics.median(seconds), 1), "max": round(1000 * max(seconds), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--switches", type=int, default=20, help="promote once, then rollbacks to and fro")
    parser.add_argument("--aborts", type=int, default=20, help="of each kind")
    parser.add_argument("--clients", type=int, default=4, help="of the steady stream of requests")
    args = parser.parse_args()
    demo = VersionFile.model_validate(
        {"label": "demo", "checkpoint": str(DEMO), "runner": "torch", "linked": True, "device": "cpu"}
    )
    result: dict[str, Any] = {"settings": vars(args), "load_average_before": os.getloadavg(), "cpus": os.cpu_count()}
    with tempfile.TemporaryDirectory(prefix="piccard-bench-") as folder:
        home = Path(folder) / "home"
        init_home(home, {1: scripted_version("v1"), 2: scripted_version("v2"), DEMO_VERSION: demo})
        server = RunningServer(home, "--gateway")
        update_policy(server.service, traffic_ratio=0.0)
        try:
            server.wait_ready()
            result["switches"] = switches(server, args.switches, args.clients)
            result["cancel_by_token"] = aborts(server, args.aborts, cancel_by_token)
            result["direct_client_leaves"] = aborts(server, args.aborts, leave_directly)
            wait_for(lambda: answers_gateway(server), 60, "the gateway")
            result["gateway_client_leaves"] = aborts(server, args.aborts, leave_gateway)
            result["gateway_client_leaves_before_the_first_token"] = aborts(server, args.aborts, leave_gateway_early)
        finally:
            server.stop()
    result["load_average_after"] = os.getloadavg()
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "reactions.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
