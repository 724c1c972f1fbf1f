"""`piccard serve`: one tritonserver, started or taken over, its versions loaded one by one, what dies revived."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from piccard_contract.home import Service, version_owner
from piccard_contract.live_state import LiveState, LiveStateError, SectionWriter
from piccard_contract.process_lock import AlreadyHeldError, ProcessLock, is_held
from piccard_contract.reports import SupervisorReport

from piccard.errors import OperationError
from piccard.found_server import FoundServer, find_server
from piccard.gateway_process import OWNER as GATEWAY
from piccard.gateway_process import GatewayProcess
from piccard.health_server import Health, HealthServer, Question
from piccard.keys import admin_key_path, read_secret
from piccard.policy_store import load_policy
from piccard.prerequisites import problems
from piccard.readiness import Readiness
from piccard.revival_counts import RevivalCounts
from piccard.rollout.keeper import Keeper
from piccard.rollout.samples import RolloutSamples
from piccard.server_log import put_aside, server_log
from piccard.server_process import AdoptedServer, Server
from piccard.server_settings import ServerSettings
from piccard.server_start import make_server
from piccard.settle import settle
from piccard.startup import Startup
from piccard.state_store import StateStore, services_of
from piccard.takeover import Beginning, beginning, differing_options, last_reports
from piccard.triton_binary import TritonInstall, find_triton
from piccard.triton_control import TritonControl
from piccard.watch import Watch, requests_of

OWNER = "supervisor"
TICK = 0.1
PUBLISH_EVERY = 0.5
READY_TIMEOUT = 10.0

_STARTING: Health = (False, {"ready": False, "reason": "the server is starting"})

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
        self._rollouts: list[RolloutSamples] = []
        self._phase = "starting"
        self._trouble = ""
        self._started_at = time.time()
        self._counts = RevivalCounts()
        self._readiness = Readiness(settings.address("grpc"))
        self._watch: Watch | None = None
        self._server: Server | None = None
        self._taken_over = False
        self._control: TritonControl | None = None
        self._gateway: GatewayProcess | None = None

    def end(self) -> None:
        """Have `run` end the server in order; from any thread, but not in a signal's handler."""
        self._ending.set()

    def run(self) -> int:
        """Start a server, or take over the one that runs; serve until `end`, and end it.

        Where this fails in a way that was not foreseen the server goes on, as it does where this process is killed.

        Returns:
            0 where it was told to end, 1 where the server ended by itself.

        Raises:
            OperationError: something is missing; no server was started.
        """
        health: HealthServer | None = None
        try:
            services = self._services_of_home()
            reports = last_reports(services)
            self._adopt(services)
            found = find_server(self.home)
            how = beginning(found, reports)
            if found is not None and how is Beginning.TAKE_OVER:
                self._follow(found)
            self._publish()
            health = self._health_server()
            if found is None:
                self._start()
            elif how is Beginning.TAKE_OVER:
                self._take_over(found)
            else:
                self._end_other(found)
                self._start()
            health.start()
            outcome = self._serve()
            self._end_server()
            return outcome
        finally:
            self._leave(health)

    def _services_of_home(self) -> list[Service]:
        services = services_of(self.home)
        if not services:
            raise OperationError(f"{self.home} holds no service; run `piccard init {self.home}`")
        if any(is_held(service.process_lock(OWNER)) for service in services):
            raise OperationError(f"a server of {self.home} runs already; see `piccard status`, or end it first")
        return services

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
            self._rollouts.append(RolloutSamples(service))
            self._services.append(service)

    def _health_server(self) -> HealthServer:
        try:
            return HealthServer(
                self.settings.host, self.settings.health_port, self._live, self._ready, self._service_ready
            )
        except OSError as error:
            raise OperationError(
                f"port {self.settings.health_port} cannot be used ({error}); choose another with --health-port"
            ) from error

    def _start(self) -> None:
        """Start a server of our own."""
        install = self._check()
        settle(self._services, self._tell)
        server = make_server(self.home, self._services, self.settings, install)
        self._tell(f"starting {install.binary}")
        server.start()
        self._server = server

    def _check(self) -> TritonInstall:
        install = find_triton()
        processes = sum(3 + len(StateStore(service).read().loaded()) for service in self._services)
        # The health port is bound already.
        found = problems(install, self.settings, self.home, processes, bound=("--health-port",))
        if found:
            raise OperationError("\n".join(found))
        for service in self._services:
            load_policy(service)
        assert install is not None
        return install

    def _follow(self, found: FoundServer) -> None:
        """Go by the addresses of the server that runs."""
        differing = differing_options(self.settings, found.settings)
        if differing:
            self._tell(f"the server runs already; {', '.join(differing)} will count at its next start")
        own = self.settings
        self.settings = replace(
            found.settings,
            health_port=own.health_port,
            give_up_after=own.give_up_after,
            gateway_host=own.gateway_host,
            gateway_port=own.gateway_port,
        )
        self._readiness = Readiness(self.settings.address("grpc"))

    def _take_over(self, found: FoundServer) -> None:
        """Stand in for a supervisor that is gone; the server and its models go on as they are."""
        try:
            self._server = AdoptedServer(found)
        except ProcessLookupError:
            raise OperationError(f"tritonserver (process {found.pid}) has just ended; run this again") from None
        self._taken_over = True
        self._tell(f"taking over tritonserver (process {found.pid}), which goes on as it is")

    def _end_other(self, found: FoundServer) -> None:
        self._tell(f"ending tritonserver (process {found.pid}), as the supervisor before was told to")
        try:
            AdoptedServer(found).stop(found.settings.exit_timeout + 15, self._idle)
        except ProcessLookupError:
            return

    def _serve(self) -> int:
        assert self._server is not None
        self._publish()
        self._control = TritonControl(self.settings.address("grpc"), read_secret(admin_key_path(self.home)))
        keeper = Keeper(lambda: list(self._services), self._tell, self._ending)
        threading.Thread(target=keeper.run, name="rollouts", daemon=True).start()
        # Triton opens its ports only when what it loads at the start is loaded, however long that takes.
        while not self._control.live():
            if self._ending.wait(TICK) or not self._server.running:
                return self._outcome()
            self._publish()
        if self.settings.gateway_port is not None:
            self._gateway = GatewayProcess(self.home, self.settings, self._tell, self._counts)
            self._gateway.start()
        self._watch = Watch(self._control, self._tell, self._counts, self._ending, self.settings.give_up_after)
        threading.Thread(target=self._start_up, args=(self._control, self._watch), name="startup", daemon=True).start()
        published = 0.0
        while not self._ending.wait(TICK):
            if not self._server.running:
                return self._outcome()
            due = time.monotonic() - published >= PUBLISH_EVERY
            if due:
                published = time.monotonic()
            self._tend(self._watch, due=due)
        return self._outcome()

    def _start_up(self, control: TritonControl, watch: Watch) -> None:
        if self._taken_over:
            settle(self._services, self._tell, control)
            watch.expect(self._services)
        addresses = {name: self.settings.address(name) for name in ("http", "grpc", "metrics", "health")}
        startup = Startup(control, self._readiness, addresses, self._tell, self._ending, taken_over=self._taken_over)
        if startup.run(list(self._services)):
            self._phase = "serving"

    def _tend(self, watch: Watch, *, due: bool) -> None:
        """Look after the services; a home that somebody broke by hand is told of and does not end the server."""
        try:
            watch.look(self._services)
            if self._gateway is not None:
                self._gateway.look(self._services)
            if due:
                self._adopt(services_of(self.home))
                self._publish()
                watch.end_stuck(self._services)
                watch.learn(self._services)
                watch.retire_drained(self._services)
                put_aside(server_log(self.home))
        except (OperationError, LiveStateError, OSError) as error:
            if str(error) != self._trouble:
                self._tell(str(error))
            self._trouble = str(error)
        else:
            self._trouble = ""

    def _outcome(self) -> int:
        assert self._server is not None
        if self._ending.is_set():
            return 0
        code = self._server.exit_code
        log = server_log(self.home)
        self._tell(f"tritonserver ended by itself{'' if code is None else f' (exit code {code})'}; the last of {log}:")
        for line in _tail(log, 8):
            self._tell(f"  {line}")
        return 1

    def _live(self) -> Health:
        running = self._server is not None and self._server.running
        return running, {"live": running, "phase": self._phase}

    def _ready(self) -> Health:
        if self._watch is None:
            return _STARTING
        given_up = self._watch.given_up()
        answers = {service.name: self._ready_of(service, given_up) for service in list(self._services)}
        ready = all(good for good, _ in answers.values()) and not self._ending.is_set()
        body: dict[str, Any] = {"ready": ready, "services": {name: body for name, (_, body) in answers.items()}}
        body |= {"given_up": given_up, **self._told_of_gateway()}
        return ready, body

    def _told_of_gateway(self) -> dict[str, Any]:
        """Whether the gateway runs; nothing where there is none. The services are ready without it all the same."""
        if self._gateway is None:
            return {}
        return {"gateway": {"running": bool(self._gateway.pid), "given_up": self._gateway.given_up}}

    def _service_ready(self, name: str) -> Question | None:
        """The question whether the service `name` is ready, whatever becomes of the others."""
        service = next((service for service in list(self._services) if service.name == name), None)
        return None if service is None else partial(self._ready_alone, service)

    def _ready_alone(self, service: Service) -> Health:
        if self._watch is None:
            return _STARTING
        given_up = self._watch.given_up()
        good, body = self._ready_of(service, given_up)
        ready = good and not self._ending.is_set()
        own = {name: why for name, why in given_up.items() if name.startswith(f"{service.name}/")}
        return ready, {**body, "ready": ready, "given_up": own}

    def _ready_of(self, service: Service, given_up: dict[str, str]) -> Health:
        lacks = [name for name in _needed(service) if name in given_up]
        if lacks:
            return False, {"ready": False, "reason": f"{', '.join(lacks)} is given up"}
        return self._readiness.of(service, READY_TIMEOUT)

    def _publish(self) -> None:
        waiting = self._watch.waiting() if self._watch else {}
        given_up = self._watch.given_up() if self._watch else {}
        if self._gateway is not None:
            seconds = self._gateway.seconds_left()
            names = [f"{service.name}/{GATEWAY}" for service in self._services]
            waiting |= dict.fromkeys(names, seconds) if seconds is not None else {}
            given_up |= dict.fromkeys(names, self._gateway.given_up) if self._gateway.given_up else {}
        report = SupervisorReport(
            http=self.settings.address("http"),
            grpc=self.settings.address("grpc"),
            metrics=self.settings.address("metrics"),
            server_pid=self._server.pid if self._server else 0,
            revivals=self._counts.by_process(),
            next_start={name: time.time() + seconds for name, seconds in waiting.items()},
            given_up=given_up,
            details={
                "health": self.settings.address("health"),
                "gateway": self.settings.address("gateway") if self._gateway is not None else None,
                "phase": self._phase,
                "pid": os.getpid(),
                "started_at": self._started_at,
                "services": [service.name for service in self._services],
            },
        )
        for service, (_, section), rollout in zip(self._services, self._sections, self._rollouts, strict=True):
            samples = self._counts.samples(service.name, given_up) + rollout.now()
            section.publish(report.model_copy(update={"samples": samples}).model_dump(mode="json"))

    def _idle(self) -> bool:
        """Whether no living process of a service has a request."""
        return not any(
            section.alive and requests_of(section.data) for state, _ in self._sections for section in state.sections()
        )

    def _end_server(self) -> None:
        """End the server, or what one that ended by itself has left."""
        server = self._server
        assert server is not None
        self._phase = "stopping"
        self._ending.set()
        if not server.running:
            self._end_gateway(0)
            server.stop(0)
            return
        self._tell(f"ending: streams in flight get {self.settings.exit_timeout} s")
        # Its streams are the server's too, and it takes no new ones from now on.
        self._end_gateway(self.settings.exit_timeout)
        stopper = threading.Thread(target=server.stop, args=(self.settings.exit_timeout + 15, self._idle))
        stopper.start()
        while stopper.is_alive():
            self._publish()
            stopper.join(PUBLISH_EVERY)

    def _end_gateway(self, grace: float) -> None:
        if self._gateway is None:
            return
        stopper = threading.Thread(target=self._gateway.stop, args=(grace,))
        stopper.start()
        while stopper.is_alive():
            self._publish()
            stopper.join(PUBLISH_EVERY)

    def _leave(self, health: HealthServer | None) -> None:
        self._ending.set()
        if self._server is not None and self._server.running:
            self._tell(f"tritonserver (process {self._server.pid}) goes on; `piccard serve` takes it over")
        if health is not None:
            health.stop()
        if self._control is not None:
            self._control.close()
        for state, _ in self._sections:
            state.close()
        for lock in self._locks:
            lock.release()


def _needed(service: Service) -> list[str]:
    """Processes without which a service does not answer everybody, as `service/owner`."""
    stable = StateStore(service).read().stable
    owners = ["admission", "router", "router_unary", *([] if stable is None else [version_owner(stable)])]
    return [f"{service.name}/{owner}" for owner in owners]


def _tail(path: Path, count: int) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()[-count:]
    except OSError:
        return []


def print_line(line: str) -> None:
    """Print a line at once, also into a pipe; that nobody listens, or a terminal is gone, is no reason to fail."""
    try:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except (OSError, ValueError):
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
