"""One tritonserver process: started, waited for and ended, leaving no process and no shared memory behind."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from piccard.shared_memory import regions, remove_regions

_PR_SET_PDEATHSIG = 1

# Seconds that an ending server gets after its last request; unloading takes one or two.
IDLE_GRACE = 8.0


class ServerProcess:
    """A tritonserver and the stub processes that it starts.

    It runs in a process group of its own, so that a Ctrl-C at the terminal reaches the supervisor alone, which ends
    the server in order. Should the supervisor be killed, the kernel ends the server.

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
        self._command = list(command)
        self._environment = environment
        self._folder = folder
        self._log = log
        self._region_prefix = region_prefix
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The server's process id, 0 before it is started."""
        return self._process.pid if self._process else 0

    @property
    def exit_code(self) -> int | None:
        """None while it runs or before it is started."""
        return self._process.poll() if self._process else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it; call this in the main thread, with whose end the kernel ends the server."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        parent = os.getpid()
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: _end_with(parent),
            )

    def wait_until(self, ready: Callable[[], bool], timeout: float, interval: float = 0.05) -> bool:
        """Whether `ready` became true within `timeout` seconds while the server ran."""
        deadline = time.monotonic() + timeout
        while self.running and time.monotonic() < deadline:
            if ready():
                return True
            time.sleep(interval)
        return False

    def stop(self, grace: float, idle: Callable[[], bool] = lambda: False) -> int | None:
        """End the server: SIGTERM, and SIGKILL after `grace` seconds; then whatever it left.

        Args:
            idle: whether no request is left that anybody waits for. A server that holds on to a request which is over
                (one that was cancelled as it ended) is not waited for longer than some seconds.

        Returns:
            its exit code, or None where it was never started.
        """
        if self._process is None:
            return None
        if self._process.poll() is None:
            self._process.terminate()
            if not self._wait_end(grace, idle):
                self._process.kill()
                self._process.wait()
        self._end_group()
        remove_regions(regions(self._region_prefix))
        return self._process.returncode

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

    def _end_group(self) -> None:
        assert self._process is not None
        # Stubs outlive a server that was killed; the group's id is that of its first process.
        for _ in range(50):
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                return
            time.sleep(0.02)


def _end_with(parent: int) -> None:
    """In the child, before exec: have the kernel send SIGTERM when the parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)
