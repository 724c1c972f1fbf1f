"""Uses a server up as months would: versions come and go, requests run, and some clients do not stay to the end."""

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from callers import CALLERS, Call, Caller, Told
from footprint import Footprint, footprint
from piccard.operation import operation
from piccard.publish import Publication, publish
from piccard.retire import retire
from piccard_server import RunningServer, wait_for
from request_mix import ScriptedRequest
from triton_calls import GrpcStream, Outputs

# Every tenth request is cancelled, in each of these ways in turn.
CANCEL_EVERY = 10
WAYS = ("grpc token", "grpc disconnect", "http token", "http disconnect", "version disconnect")

# Tokens and seconds between them of a request that is cancelled: nobody hears its end, so it has to come by itself.
ENDLESS = (200, 0.01)


def publish_and_retire(server: RunningServer) -> int:
    """One version comes, answers through both routers and goes again; its number."""
    service = server.service
    publication = Publication(
        Path("scripted"), f"v{server.state().next_version}", {"runner": "scripted", "linked": True}
    )
    with operation(server.home, service.name, tell=_ignore) as op:
        number: int = publish(op, publication).after["version"]
    for entry in ("grpc_stream", "grpc_unary"):
        caller = CALLERS[entry](server)  # type: ignore[call-arg]
        request = ScriptedRequest(number, 3, headers={"version": str(number)})
        told = caller.call(request.call)
        caller.close()
        assert not request.faults(told), request.faults(told)
    with operation(server.home, service.name, tell=_ignore) as op:
        retire(op, number, force=False, wait=120.0)
    assert number not in server.state().loaded()
    return number


class Requests:
    """Requests on kept connections of every kind, `workers` at once; every tenth is cancelled.

    Attributes:
        done, cancelled: so far.
        faults: what was wrong with those that were not cancelled.
    """

    def __init__(self, server: RunningServer, workers: int = 8) -> None:
        self.done = 0
        self.cancelled = 0
        self.faults: list[str] = []
        self._server = server
        self._lock = threading.Lock()
        self._numbers: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._waiting = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._work, args=(kind,), daemon=True) for kind in range(workers)]
        self._next = 0
        for thread in self._threads:
            thread.start()

    def run(self, count: int) -> None:
        """Send `count` more and wait until each is over."""
        for number in range(self._next, self._next + count):
            self._numbers.put(number)
        self._next += count
        for _ in range(count):
            assert self._waiting.acquire(timeout=120), f"stuck after {self.done} requests: {self.faults[:5]}"

    def close(self) -> None:
        for _ in self._threads:
            self._numbers.put(None)
        for thread in self._threads:
            thread.join(60)

    def _work(self, kind: int) -> None:
        entries = list(CALLERS)
        callers: dict[str, Caller] = {}

        def caller(name: str) -> Caller:
            if name not in callers:
                callers[name] = CALLERS[name](self._server)  # type: ignore[call-arg]
            return callers[name]

        while (number := self._numbers.get()) is not None:
            try:
                if number % CANCEL_EVERY == 0:
                    faults = self._cancel(WAYS[number // CANCEL_EVERY % len(WAYS)], number, caller)
                else:
                    request = ScriptedRequest(number, 1 + number % 8, delay=0.0)
                    faults = request.faults(caller(entries[(kind + number) % len(entries)]).call(request.call))
            except Exception as error:
                faults = [f"request {number}: {error!r}"]
                callers.clear()
            with self._lock:
                self.done += 1
                self.cancelled += number % CANCEL_EVERY == 0
                self.faults += faults
            self._waiting.release()
        for made in callers.values():
            made.close()

    def _cancel(self, way: str, number: int, caller: Callable[[str], Caller]) -> list[str]:
        """Begin a long request and end it after its first response, in one of WAYS; what was wrong."""
        tokens, delay = ENDLESS
        call = ScriptedRequest(number, tokens, delay=delay).call
        if way == "version disconnect":
            leave_version(self._server, call)
            return []
        through = caller("grpc_stream" if way.startswith("grpc") else "generate_stream")
        if way.endswith("disconnect"):
            call.leave_after = 1
            through.call(call)
            return []
        answers: list[Told] = []

        def cancel(first: Outputs) -> None:
            answers.append(caller("grpc_unary").call(Call({"extensions": {"cancel": first["cancel_token"][0]}})))

        call.on_first = cancel
        told = through.call(call)
        if told.error is None or "[CANCELLED" not in told.error:
            return [f"cancelled request {number} ended with {told}, the cancel with {answers}"]
        return []


def leave_version(server: RunningServer, call: Call) -> None:
    """Ask a version itself and go away after its first response, which it notices."""
    stream = GrpcStream(server.grpc)
    stream.send(server.service.llm, version="1", stream=True, **call.inputs)
    stream.next(60.0)
    stream.cancel()


Samples = list[tuple[int, Footprint]]
Tell = Callable[[int, Footprint], None]


def sampled_cycles(server: RunningServer, count: int, every: int, tell: Tell = lambda at, sample: None) -> Samples:
    """Publish and retire `count` versions; a sample before and after each `every`."""
    return _sampled(server, count, every, lambda: publish_and_retire(server), tell)


def sampled_requests(server: RunningServer, count: int, every: int, tell: Tell = lambda at, sample: None) -> Samples:
    """Send `count` requests; a sample before and after each `every`.

    Raises:
        AssertionError: one that was not cancelled came out wrong.
    """
    requests = Requests(server)
    try:
        samples = _sampled(
            server, count // every, 1, lambda: requests.run(every), lambda at, sample: tell(at * every, sample)
        )
    finally:
        requests.close()
    assert not requests.faults, requests.faults[:5]
    assert requests.cancelled == -(-count // every * every // CANCEL_EVERY)
    return [(at * every, sample) for at, sample in samples]


def _sampled(server: RunningServer, count: int, every: int, use: Callable[[], object], tell: Tell) -> Samples:
    samples: Samples = []
    for number in range(count + 1):
        if number:
            use()
        if number % every == 0:
            settle(server)
            samples.append((number, footprint(server)))
            tell(*samples[-1])
    return samples


def settle(server: RunningServer) -> None:
    """Wait until nothing runs: no request in any process, and no version on its way out."""
    wait_for(lambda: len(version_processes(server)) <= len(server.state().loaded()), 120, "the end of versions")
    wait_for(lambda: not _busy(server), 120, "an idle server")


def version_processes(server: RunningServer) -> list[psutil.Process]:
    """The processes of versions, those that end too."""
    folder = str(server.service.llm_folder)
    found = []
    for process in psutil.Process(server.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if any(folder in argument for argument in process.cmdline()[1:2]):
                found.append(process)
    return found


def _busy(server: RunningServer) -> bool:
    reports: list[dict[str, Any]] = []
    for owner in ("version-1", "version-2", "router", "router_unary"):
        section = server.section(owner)
        if section is None or not section.alive:
            return True
        reports.append(section.data)
    return any(
        report.get("running", 0) + report.get("waiting", 0) + sum(report.get("in_flight", {}).values())
        for report in reports
    )


def _ignore(line: str) -> None:
    """Progress is for people."""
