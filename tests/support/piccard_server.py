"""A real server for tests: a home with scripted versions and `piccard serve` over it, on free ports."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import psutil
from piccard.found_server import find_server
from piccard.home_init import init_home
from piccard.keys import admin_key_path, read_secret
from piccard.policy_store import update_policy
from piccard.server_log import server_log
from piccard.shared_memory import home_prefix, regions
from piccard.state_store import StateStore
from piccard.triton_control import TritonControl
from piccard_contract.home import Service, version_owner
from piccard_contract.lifecycle import ServiceState
from piccard_contract.live_state import LiveState, Section
from piccard_contract.version_file import Profile, Runner, VersionFile
from ports import free_ports
from prometheus_client.parser import text_string_to_metric_families

Answer = TypeVar("Answer")

# Times that a test which kills processes is begun, where the whole server went with one of them.
TRIES = 3


class ServerDiedError(Exception):
    """tritonserver went with a process that was killed with a lock of it in its hands (docs/operations.md)."""


def scripted_version(label: str, profile: Profile = Profile.BALANCED) -> VersionFile:
    """A version that plays what `extensions.script` says."""
    return VersionFile(label=label, checkpoint="scripted", runner=Runner.SCRIPTED, profile=profile, linked=True)


def make_scripted_home(folder: Path, versions: int = 2, **policy: Any) -> Service:
    """A home with scripted versions 1 (stable), 2 (canary at 10 %) and on; `policy` sets keys of policy.yaml."""
    init_home(folder, {number: scripted_version(f"v1.{number - 1}.0") for number in range(1, versions + 1)})
    service = Service(folder)
    if policy:
        update_policy(service, **policy)
    return service


def wait_for(look: Callable[[], Answer | None], timeout: float, what: str, pause: float = 0.02) -> Answer:
    """The first true answer of `look`, asked every `pause` seconds; fails the test after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if answer := look():
            return answer
        time.sleep(pause)
    raise AssertionError(f"after {timeout} s still waiting for {what}")


class RunningServer:
    """`piccard serve` of one home.

    Args:
        threads: of OpenMP in each of its processes; None leaves them to the versions.

    Attributes:
        http, grpc, metrics, health, gateway: addresses as host:port; the gateway runs with the option --gateway alone.
        process: the supervisor.
        output: file with what it printed.
        started: every one that this process made and that may still run.
    """

    started: ClassVar[list["RunningServer"]] = []

    def __init__(self, home: Path, *options: str, python: Path | str = sys.executable, threads: int | None = 1) -> None:
        self.home = home
        self._python = python
        self._environment = os.environ | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
        self.service = Service(home)
        ports = free_ports(4)
        self.http, self.grpc, self.metrics, self.health = (f"127.0.0.1:{port}" for port in ports)
        # A process more for each server of the tests, which few of them need.
        self.gateway = f"127.0.0.1:{free_ports(1)[0]}"
        gateway = f"--gateway-port={self.gateway.split(':')[1]}" if "--gateway" in options else "--no-gateway"
        options = tuple(option for option in options if option != "--gateway")
        names = ("--http-port", "--grpc-port", "--metrics-port", "--health-port")
        self._options = [*(f"{name}={port}" for name, port in zip(names, ports, strict=True)), gateway, *options]
        self.output = home / "serve.out"
        self.ports = ports
        self.process = self._serve()
        self.started.append(self)

    def _serve(self) -> "subprocess.Popen[bytes]":
        with open(self.output, "ab") as output:
            return subprocess.Popen(
                [self._python, "-m", "piccard", "serve", f"--home={self.home}", *self._options],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
            )

    def kill_supervisor(self) -> None:
        """kill -9 of `piccard serve`; its server goes on."""
        self.process.kill()
        self.process.wait()

    def serve_again(self) -> None:
        """Run `piccard serve` as before, after it has ended; it takes over what runs."""
        assert self.process.poll() is not None
        self.process = self._serve()

    def wait_ready(self, timeout: float = 150.0) -> "RunningServer":
        """Wait until /readyz says yes and the supervisor has loaded every version that state.json wants."""
        # Each look is two requests, which the server that starts has to answer.
        wait_for(self._ready_or_over, timeout, f"the server; it printed:\n{self.printed()}", pause=0.2)
        return self

    def _ready_or_over(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"piccard serve ended ({self.process.returncode}):\n{self.printed()}")
        status, body = self.get("livez")
        return status == 200 and body["phase"] == "serving" and self.get("readyz")[0] == 200 and self.loaded_all()

    def loaded_all(self) -> bool:
        """Whether every version that is not failed or retired has its process, ready for requests."""
        return all(self.version_ready(number) for number in self.state().loaded())

    def version_ready(self, version: int) -> bool:
        section = self.section(version_owner(version))
        return section is not None and section.alive and section.data.get("phase") == "ready"

    def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON of the supervisor's /livez or /readyz; status 0 where nobody answers."""
        try:
            with urllib.request.urlopen(f"http://{self.health}/{path}", timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)
        except OSError:
            return 0, None

    def metrics_text(self) -> str:
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=60) as answer:
            text: str = answer.read().decode()
            return text

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels; 0 where there are none."""
        return sum(
            (
                sample.value
                for family in text_string_to_metric_families(self.metrics_text())
                for sample in family.samples
                if sample.name == name and labels.items() <= sample.labels.items()
            ),
            0.0,
        )

    def printed(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")

    def lock_exceptions(self) -> int:
        """Mentions in its log of an end of tritonserver because a killed process held a lock (server 2.51)."""
        log = server_log(self.home)
        return log.read_bytes().count(b"lock_exception") if log.exists() else 0

    def state(self) -> ServiceState:
        return StateStore(self.service).read()

    def server_pid(self) -> int:
        """The process of tritonserver; 0 where there is none."""
        section = self.section("supervisor")
        pid: int = section.data["server_pid"] if section is not None else 0
        return pid

    def processes(self) -> list[int]:
        """tritonserver and what it started; also where its supervisor is dead."""
        found = find_server(self.home)
        if found is None:
            return []
        with suppress(psutil.NoSuchProcess):
            return [found.pid, *(child.pid for child in psutil.Process(found.pid).children(recursive=True))]
        return []

    def section(self, owner: str) -> Section | None:
        """What a process of the service published last."""
        if not self.service.live_state.exists():
            return None
        live = LiveState(self.service.live_state, self.service.run_folder)
        try:
            return live.read(owner)
        finally:
            live.close()

    def report(self, owner: str) -> dict[str, Any]:
        """The data of its section; an owner that has none fails the test."""
        section = self.section(owner)
        assert section is not None, f"{owner} has no section"
        return section.data

    def in_flight(self, version: int) -> int:
        """Requests that a version runs or lets wait, as it reports."""
        report = self.report(version_owner(version))
        count: int = report["running"] + report["waiting"]
        return count

    def pid(self, owner: str) -> int:
        """The process id of version-2, router, admission, ..."""
        section = self.section(owner)
        assert section is not None, f"{owner} never published"
        assert section.alive, f"{owner} is dead"
        return section.pid

    def control(self) -> TritonControl:
        return TritonControl(self.grpc, read_secret(admin_key_path(self.home)))

    def problems(self) -> list[dict[str, str]]:
        """What `piccard doctor` finds, drift apart: who works on the code meanwhile changes what is installed."""
        told = json.loads(self.piccard("doctor", "--json", check=False).stdout)
        return [finding for finding in told["after"]["findings"] if finding["trap"] != "drift"]

    def piccard(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run the command against this home."""
        return run_piccard(self.home, *arguments, check=check)

    def stop(self, timeout: float = 120.0, number: int = signal.SIGTERM) -> int:
        """End it as a user would, and fail where anything is left.

        Returns:
            its exit code.
        """
        started = [self.process.pid, *self.processes()]
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            for pid in started:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()
            raise AssertionError(f"piccard serve did not end within {timeout} s:\n{self.printed()}") from None
        left = [pid for pid in started[1:] if runs(pid)]
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert not left, f"processes are left:\n{self.printed()}"
        assert not regions(home_prefix(self.home)), "shared memory is left"
        assert not [port for port in self.ports if _listens(port)], "ports are left open"
        return code


def run_piccard(
    home: Path, *arguments: str, check: bool = True, python: Path | str = sys.executable
) -> subprocess.CompletedProcess[str]:
    """Run the piccard command against a home; with check, an exit code other than 0 fails the test."""
    result = subprocess.run(
        [python, "-m", "piccard", *arguments, f"--home={home}"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if check:
        assert result.returncode == 0, f"piccard {' '.join(arguments)}:\n{result.stdout}{result.stderr}"
    return result


def runs(pid: int) -> bool:
    """Whether a process runs; one that ended and was not yet waited for does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
