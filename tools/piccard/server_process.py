"""One tritonserver process: started or found, waited for and ended, leaving no process and no shared memory behind."""

import os
import select
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from piccard.found_server import FoundServer
from piccard.shared_memory import regions, remove_regions

# Seconds that an ending server gets after its last request; unloading takes one or two.
IDLE_GRACE = 8.0


class Server(ABC):
    """A tritonserver and the stub processes that it starts, which are of its process group.

    Args:
        region_prefix: what the names of its shared-memory regions begin with.
    """

    def __init__(self, region_prefix: str) -> None:
        self._region_prefix = region_prefix

    @property
    @abstractmethod
    def pid(self) -> int:
        """The server's process id, 0 before it is started."""

    @property
    @abstractmethod
    def exit_code(self) -> int | None:
        """How it ended; None while it runs, and where nobody was told."""

    @property
    @abstractmethod
    def running(self) -> bool:
        """Whether its process runs."""

    @abstractmethod
    def _signal(self, number: int) -> None:
        """Send a signal to its process, which may have ended."""

    def stop(self, grace: float, idle: Callable[[], bool] = lambda: False) -> int | None:
        """End the server: SIGTERM, and SIGKILL after `grace` seconds; then whatever it left.

        Args:
            idle: whether no request is left that anybody waits for. A server that holds on to a request which is over
                (one that was cancelled as it ended) is not waited for longer than some seconds.

        Returns:
            its exit code, or None where it is not known.
        """
        if not self.pid:
            return None
        if self.running:
            self._signal(signal.SIGTERM)
            if not self._wait_end(grace, idle):
                self._signal(signal.SIGKILL)
                self._wait_end(float("inf"), lambda: False)
        end_group(self.pid)
        remove_regions(regions(self._region_prefix))
        return self.exit_code

    def _wait_end(self, grace: float, idle: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + grace
        busy = time.monotonic()
        while self.running:
            now = time.monotonic()
            if not idle():
                busy = now
            if now >= deadline or now - busy >= IDLE_GRACE:
                return False
            time.sleep(0.05)
        return True


class ServerProcess(Server):
    """A tritonserver that this process starts.

    It runs in a session of its own, so that a Ctrl-C at the terminal reaches the supervisor alone, which ends the
    server in order. It goes on where the supervisor is killed.

    Args:
        command: the executable and its arguments.
        environment: its environment.
        folder: its working folder. The stubs look there first for modules, so it holds none.
        log: file that its output is appended to.
        region_prefix: what the names of its shared-memory regions begin with.
    """

    def __init__(
        self, command: Sequence[str], environment: dict[str, str], folder: Path, log: Path, region_prefix: str
    ) -> None:
        super().__init__(region_prefix)
        self._command = list(command)
        self._environment = environment
        self._folder = folder
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def exit_code(self) -> int | None:
        return self._process.poll() if self._process else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)


class AdoptedServer(Server):
    """A tritonserver that another process started, which is gone.

    Raises:
        ProcessLookupError: it has ended.
    """

    def __init__(self, found: FoundServer) -> None:
        super().__init__(found.region_prefix)
        self._pid = found.pid
        # Names this very process, also once its number is another's.
        self._handle = os.pidfd_open(found.pid)
        self._ended = select.poll()
        self._ended.register(self._handle, select.POLLIN)

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def exit_code(self) -> int | None:
        return None

    @property
    def running(self) -> bool:
        return not self._ended.poll(0)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)


def end_group(group: int) -> None:
    """End all processes of a group whose first has ended: stubs outlive a server that was killed."""
    for _ in range(50):
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            return
        time.sleep(0.02)
