"""A double of a server's model control: versions and steps of one service, their processes, the configuration on disk.

It keeps what a tritonserver does as tools see it: a start follows config.pbtxt, all or nothing; a load names the whole
set, loads what is new and lets go of the rest; a version that was let go ends after its last request. One whose process
died stays in the index as ready, and a load that names it again does not start it.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from piccard.errors import OperationError
from piccard.places import steps
from piccard.probe import ProbeError
from piccard.repository import configured_versions
from piccard.state_store import StateStore
from piccard.triton_control import IndexEntry, LoadError
from piccard_contract.home import Service, version_owner
from piccard_contract.lifecycle import SERVING_STATES
from piccard_contract.live_state import LiveState
from piccard_contract.process_lock import ProcessLock
from piccard_contract.reports import SupervisorReport
from piccard_contract.version_file import VersionFileError, read_version_file

# Of a label of a version that loads and then answers no prompt.
BAD = "bad"


class FakeTriton:
    """The server of one service.

    Attributes:
        running: whether it answers.
        loaded: versions in its index, ready.
        broken: versions whose process cannot be started.
        draining: versions that were let go and have a request yet.
        starts: how often each version was started.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        self.running = False
        self.starts: dict[int, int] = {}
        self._locks: dict[str, ProcessLock] = {}
        self.loaded: set[int] = set()
        self.broken: set[int] = set()
        self.draining: set[int] = set()
        self._live = LiveState(service.live_state, service.run_folder)

    def start(self) -> None:
        """Load what config.pbtxt names; where one of those fails, nothing."""
        self.running = True
        self._acquire("supervisor")
        self.report({})
        for owner in steps(self.service).values():
            self._publish(owner, {})
        wanted = configured_versions(self.service) or []
        if not self._problem(wanted):
            for version in wanted:
                self._run(version)

    def report(self, given_up: dict[str, str]) -> None:
        """Have its supervisor publish what it has given up, and why, by `service/owner`."""
        report = SupervisorReport(grpc="fake", given_up=given_up, details={"phase": "serving"})
        self._live.writer("supervisor").publish(report.model_dump(mode="json"))

    def kill(self) -> None:
        """End the server and every process of it."""
        self.running = False
        self.loaded.clear()
        self.draining.clear()
        for lock in self._locks.values():
            lock.release()
        self._locks.clear()

    def close(self) -> None:
        self.kill()
        self._live.close()

    def die(self, version: int) -> None:
        """The process of a version ends; the server does not notice."""
        self._locks.pop(version_owner(version)).release()

    def dead(self) -> set[int]:
        """Versions in the index whose process has died."""
        return {version for version in self.loaded if version_owner(version) not in self._locks}

    def finish_streams(self) -> None:
        """The last requests of draining versions are over, so their processes end."""
        for version in self.draining:
            self._locks.pop(version_owner(version)).release()
        self.draining.clear()

    def set_versions(self, wanted: set[int]) -> None:
        """What the load API does with an override that names `wanted`."""
        if problem := self._problem(wanted):
            raise LoadError(problem)
        self._let_go(self.loaded - wanted)
        for version in sorted(wanted - self.loaded):
            if self.service.version_folder(version).is_dir():
                self._run(version)

    def unload(self) -> None:
        """What the unload API does."""
        self._let_go(set(self.loaded))

    def _let_go(self, versions: set[int]) -> None:
        # What has died already has no request to finish.
        self.draining |= versions - self.dead()
        self.loaded -= versions

    def _problem(self, wanted: Iterable[int]) -> str:
        for path in self.service.llm_folder.iterdir():
            if path.is_symlink() and not path.exists():
                return f"{path} points at nothing"
        for version in set(wanted) - self.loaded:
            if version in self.broken:
                return f"version {version} finds no memory"
            if version in self.draining:
                return f"version {version} is unloading yet"
            folder = self.service.version_folder(version)
            if not folder.is_dir():
                continue
            try:
                read_version_file(folder)
            except (OSError, VersionFileError) as error:
                return f"version {version}: {error}"
            if not (folder / "model.py").is_file():
                return f"version {version} has no model.py"
        return ""

    def _run(self, version: int) -> None:
        # A draining version reports its request, so that nobody takes it for one that hangs.
        self._publish(version_owner(version), {"version": version, "phase": "ready", "running": 1})
        self.starts[version] = self.starts.get(version, 0) + 1
        self.loaded.add(version)

    def _publish(self, owner: str, report: dict[str, object]) -> None:
        self._acquire(owner)
        self._live.writer(owner).publish(report)

    def _acquire(self, owner: str) -> None:
        lock = ProcessLock(self.service.process_lock(owner))
        lock.acquire()
        self._locks[owner] = lock


class FakeControl:
    """What tools hold of a running server (piccard.triton_control.TritonControl).

    Args:
        server: the double behind it.
        point: called before and after each change with its name, and may raise.
    """

    address = "fake"

    def __init__(self, server: FakeTriton, point: Callable[[str], None]) -> None:
        self._server = server
        self._point = point

    def close(self) -> None:
        pass

    def live(self) -> bool:
        return self._server.running

    def index(self) -> list[IndexEntry]:
        if not self._server.running:
            raise OperationError("cannot read the index: the server is gone")
        service = self._server.service
        ready = [IndexEntry(service.llm, version, "READY", "") for version in sorted(self._server.loaded)]
        ready += [IndexEntry(model, 1, "READY", "") for model in steps(service)]
        return ready + [IndexEntry(service.llm, version, "UNLOADING", "") for version in sorted(self._server.draining)]

    def ready_versions(self, model: str) -> list[int]:
        return sorted(entry.version for entry in self.index() if entry.model == model and entry.ready)

    def set_versions(self, service: Service, model: str, versions: Iterable[int], timeout: float | None = None) -> None:
        assert (service, model) == (self._server.service, self._server.service.llm)
        wanted = set(versions)
        assert wanted, "an override that names no version is refused"
        self._point(f"before load {sorted(wanted)}")
        self._server.set_versions(wanted)
        self._point(f"after load {sorted(wanted)}")
        for version in sorted(wanted - self._server.loaded):
            raise LoadError(f"version {version} of {model} is not loaded: it is not in the server's index")

    def unload(self, model: str) -> None:
        versions = StateStore(self._server.service).read().versions
        living = self._server.loaded - self._server.dead()
        assert not [number for number in living if versions[number].state in SERVING_STATES], "it serves"
        self._point(f"before unload of {model}")
        self._server.unload()
        self._point(f"after unload of {model}")

    def wait_unloaded(self, model: str, timeout: float) -> bool:
        return not self.ready_versions(model)


def fake_probe(address: str, service: Service, version: int, timeout: float) -> None:
    """Golden prompts (piccard.probe.probe_version): a version with a label of BAD fails them."""
    assert Path(service.process_lock(version_owner(version))).exists()
    if read_version_file(service.version_folder(version)).label.startswith(BAD):
        raise ProbeError("probe 'x' gave no token")
