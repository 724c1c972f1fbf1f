"""The gateway's process beside a tritonserver: started, started again when it ends, and ended after its streams."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from piccard_contract.home import Service
from piccard_contract.process_lock import holder_pid

from piccard.errors import OperationError
from piccard.keys import make_secret
from piccard.revival import Revival
from piccard.revival_counts import RevivalCounts
from piccard.server_log import put_aside
from piccard.server_settings import ServerSettings

OWNER = "gateway"

# Seconds beyond --exit-timeout after which a gateway that was told to end is killed.
_GRACE = 5.0


def gateway_log(home: Path) -> Path:
    """What the gateway tells of itself."""
    return home / "state" / "logs" / "gateway.log"


class GatewayProcess:
    """Looks after one gateway, which serves all services of a home.

    Args:
        settings: where it listens, and the server that it asks.
        tell: takes each line for people.
        counts: of what was started again, under each of the services.
    """

    def __init__(
        self,
        home: Path,
        settings: ServerSettings,
        tell: Callable[[str], None],
        counts: RevivalCounts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._home = home
        self._settings = settings
        self._tell = tell
        self._counts = counts
        self._clock = clock
        self._revival = Revival(settings.give_up_after)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Its process id, 0 where it does not run."""
        return self._process.pid if self._process is not None and self._process.poll() is None else 0

    @property
    def given_up(self) -> str:
        """Why nobody starts it any more; empty while somebody does."""
        return self._revival.given_up

    def seconds_left(self) -> float | None:
        """Until it is started again; None where it runs or was given up."""
        return None if self.pid else self._revival.seconds_left(self._clock())

    def start(self) -> None:
        """Start it; one that a killed supervisor left lets its streams end, and makes room."""
        left = holder_pid(Service(self._home).gateway_lock)
        if left is not None:
            self._tell(f"ending the gateway before (process {left}) after its streams")
            with suppress(ProcessLookupError):
                os.kill(left, signal.SIGTERM)
        make_secret(Service(self._home).gateway_secret)
        self._spawn()
        self._revival.started(self._clock())

    def look(self, services: list[Service]) -> None:
        """Start it again where it has ended."""
        now = self._clock()
        if self.pid:
            self._revival.alive(now)
            return
        if self._process is not None:
            code = self._process.poll()
            self._process = None
            self._revival.dead(now)
            what = f"the gateway ended ({code}); {gateway_log(self._home)} says why"
            self._tell(f"{what}; it is given up: {self.given_up}" if self.given_up else what)
        if self._revival.due(now):
            self._revival.begin()
            self._spawn()
            self._revival.started(now)
            for service in services:
                self._counts.add(service.name, OWNER, stuck=False)
            self._tell("the gateway is started again")

    def stop(self, grace: float) -> None:
        """End it: SIGTERM, then SIGKILL where its streams take longer than `grace` seconds."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(grace + _GRACE)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()

    def _spawn(self) -> None:
        log = gateway_log(self._home)
        log.parent.mkdir(parents=True, exist_ok=True)
        put_aside(log)
        settings = self._settings
        command = [sys.executable, "-m", "piccard_gateway", f"--home={self._home}"]
        command += [f"--grpc={settings.address('grpc')}", f"--host={settings.gateway_host}"]
        command += [f"--port={settings.gateway_port}", f"--exit-timeout={settings.exit_timeout}"]
        with open(log, "ab") as output:
            try:
                # A session of its own, so that a Ctrl-C at the terminal ends it in order, by the supervisor.
                self._process = subprocess.Popen(
                    command,
                    cwd=self._home / "state",
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise OperationError(f"the gateway cannot be started ({error})") from error
