"""`piccard serve`: one tritonserver in the foreground, its versions loaded one by one, what dies revived."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from piccard_contract.home import Service
from piccard_contract.live_state import LiveState, LiveStateError, SectionWriter
from piccard_contract.process_lock import AlreadyHeldError, ProcessLock, is_held
from piccard_contract.reports import SupervisorReport

from piccard.errors import OperationError
from piccard.health_server import Health, HealthServer
from piccard.keys import admin_key_path, read_secret
from piccard.policy_store import load_policy
from piccard.prerequisites import problems
from piccard.readiness import Readiness
from piccard.server_process import ServerProcess
from piccard.server_settings import ServerSettings
from piccard.server_start import make_server, server_log
from piccard.settle import settle
from piccard.startup import Startup
from piccard.state_store import StateStore, services_of
from piccard.triton_binary import TritonInstall, find_triton
from piccard.triton_control import TritonControl
from piccard.watch import Watch, requests_of

OWNER = "supervisor"
TICK = 0.1
PUBLISH_EVERY = 0.5
READY_TIMEOUT = 10.0

Tell = Callable[[str], None]


class Supervisor:
    """Runs the server of a home until it is told to end.

    Args:
        home: made by `piccard init`.
        settings: addresses and limits.
        tell: takes each line for people.
    """

    def __init__(self, home: Path, settings: ServerSettings, tell: Tell) -> None:
        self.home = home.absolute()
        self.settings = settings
        self._tell = tell
        self._ending = threading.Event()
        self._locks: list[ProcessLock] = []
        self._sections: list[tuple[LiveState, SectionWriter]] = []
        self._services: list[Service] = []
        self._phase = "starting"
        self._trouble = ""
        self._started_at = time.time()
        self._revivals: dict[str, int] = {}
        self._readiness = Readiness(self._address("grpc"))
        self._watch: Watch | None = None
        self._server: ServerProcess | None = None
        self._control: TritonControl | None = None

    def end(self) -> None:
        """Have `run` end the server in order; safe in a signal handler and from any thread."""
        self._ending.set()

    def run(self) -> int:
        """Start, serve until `end` or a signal, and end.

        Returns:
            0 where it was told to end, 1 where the server ended by itself.

        Raises:
            OperationError: something is missing; the server was not started.
        """
        install = self._check()
        self._adopt(services_of(self.home))
        settle(self._services, self._tell)
        try:
            health = HealthServer(self.settings.host, self.settings.health_port, self._live, self._ready)
        except OSError as error:
            raise OperationError(
                f"port {self.settings.health_port} cannot be used ({error}); choose another with --health-port"
            ) from error
        try:
            self._server = make_server(self.home, self._services, self.settings, install)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: self.end())
            self._tell(f"starting {install.binary}")
            self._server.start()
            health.start()
            return self._serve()
        finally:
            self._end(health)

    def _check(self) -> TritonInstall:
        services = services_of(self.home)
        if not services:
            raise OperationError(f"{self.home} holds no service; run `piccard init {self.home}`")
        running = next((service for service in services if is_held(service.process_lock(OWNER))), None)
        if running is not None:
            raise OperationError(f"a server of {self.home} runs already; see `piccard status`, or end it first")
        install = find_triton()
        processes = sum(3 + len(StateStore(service).read().loaded()) for service in services)
        found = problems(install, self.settings, self.home, processes)
        if found:
            raise OperationError("\n".join(found))
        for service in services:
            load_policy(service)
        assert install is not None
        return install

    def _adopt(self, services: list[Service]) -> None:
        """Take the supervisor's place in services that are new to it."""
        for service in services:
            if service in self._services:
                continue
            lock = ProcessLock(service.process_lock(OWNER))
            try:
                lock.acquire()
            except AlreadyHeldError as error:
                raise OperationError(f"a server of {self.home} runs already ({error})") from error
            self._locks.append(lock)
            state = LiveState(service.live_state, service.run_folder)
            self._sections.append((state, state.writer(OWNER)))
            self._services.append(service)
        self._publish()

    def _serve(self) -> int:
        assert self._server is not None
        self._control = TritonControl(self._address("grpc"), read_secret(admin_key_path(self.home)))
        # Triton opens its ports only when what it loads at the start is loaded, however long that takes.
        while not self._control.live():
            if self._ending.wait(TICK) or not self._server.running:
                return self._outcome()
            self._publish()
        self._watch = Watch(self._control, self._tell, self._revivals, self._ending)
        threading.Thread(target=self._start_up, args=(self._control,), name="startup", daemon=True).start()
        published = 0.0
        while not self._ending.wait(TICK):
            if not self._server.running:
                return self._outcome()
            due = time.monotonic() - published >= PUBLISH_EVERY
            if due:
                published = time.monotonic()
            self._tend(self._watch, due=due)
        return self._outcome()

    def _start_up(self, control: TritonControl) -> None:
        addresses = {name: self._address(name) for name in ("http", "grpc", "metrics", "health")}
        if Startup(control, self._readiness, addresses, self._tell, self._ending).run(list(self._services)):
            self._phase = "serving"

    def _tend(self, watch: Watch, *, due: bool) -> None:
        """Look after the services; a home that somebody broke by hand is told of and does not end the server."""
        try:
            watch.look(self._services)
            if due:
                self._adopt(services_of(self.home))
                watch.learn(self._services)
                watch.retire_drained(self._services)
        except (OperationError, LiveStateError) as error:
            if str(error) != self._trouble:
                self._tell(str(error))
            self._trouble = str(error)
        else:
            self._trouble = ""

    def _outcome(self) -> int:
        assert self._server is not None
        if self._ending.is_set():
            return 0
        log = server_log(self.home)
        self._tell(f"tritonserver ended by itself (exit code {self._server.exit_code}); the last of {log}:")
        for line in _tail(log, 8):
            self._tell(f"  {line}")
        return 1

    def _live(self) -> Health:
        running = self._server is not None and self._server.running
        return running, {"live": running, "phase": self._phase}

    def _ready(self) -> Health:
        if self._watch is None:
            return False, {"ready": False, "reason": "the server is starting"}
        answers = {service.name: self._readiness.of(service, READY_TIMEOUT) for service in list(self._services)}
        ready = all(good for good, _ in answers.values()) and not self._ending.is_set()
        return ready, {"ready": ready, "services": {name: body for name, (_, body) in answers.items()}}

    def _publish(self) -> None:
        report = SupervisorReport(
            http=self._address("http"),
            grpc=self._address("grpc"),
            metrics=self._address("metrics"),
            server_pid=self._server.pid if self._server else 0,
            revivals=dict(self._revivals),
            details={
                "health": self._address("health"),
                "phase": self._phase,
                "pid": os.getpid(),
                "started_at": self._started_at,
                "services": [service.name for service in self._services],
            },
        ).model_dump(mode="json")
        for _, section in self._sections:
            section.publish(report)

    def _address(self, name: str) -> str:
        port: int = getattr(self.settings, f"{name}_port")
        host = self.settings.local_host
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _idle(self) -> bool:
        """Whether no living process of a service has a request."""
        return not any(
            section.alive and requests_of(section.data) for state, _ in self._sections for section in state.sections()
        )

    def _end(self, health: HealthServer) -> None:
        self._phase = "stopping"
        self._ending.set()
        if self._server is not None and self._server.running:
            self._tell(f"ending: streams in flight get {self.settings.exit_timeout} s")
            stopper = threading.Thread(target=self._server.stop, args=(self.settings.exit_timeout + 15, self._idle))
            stopper.start()
            while stopper.is_alive():
                self._publish()
                stopper.join(PUBLISH_EVERY)
        elif self._server is not None:
            self._server.stop(0)
        health.stop()
        if self._control is not None:
            self._control.close()
        for state, _ in self._sections:
            state.close()
        for lock in self._locks:
            lock.release()


def _tail(path: Path, count: int) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()[-count:]
    except OSError:
        return []


def print_line(line: str) -> None:
    """Print a line at once, also into a pipe; nobody listening is no reason to end a server."""
    try:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except (BrokenPipeError, ValueError):
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
