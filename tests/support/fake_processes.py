"""A double of a server whose model processes die and are started again, as a watch sees them."""

from collections.abc import Iterable

from piccard.errors import OperationError
from piccard.places import places
from piccard.triton_control import IndexEntry, LoadError
from piccard_contract.home import Service, version_owner
from piccard_contract.live_state import LiveState
from piccard_contract.process_lock import ProcessLock


class FakeProcesses:
    """Control of a server that has loaded versions and steps of one service, each with a lock for its process.

    Attributes:
        ready: (model, number) of what the server calls ready, whether or not its process lives.
        broken: models that cannot be loaded, with the reason.
        calls: what was asked of it, in order.
    """

    address = "fake"

    def __init__(self, service: Service, versions: Iterable[int]) -> None:
        self.service = service
        self.ready: set[tuple[str, int]] = set()
        self.broken: dict[str, str] = {}
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self.answering = True
        self._locks: dict[str, ProcessLock] = {}
        self._live = LiveState(service.live_state, service.run_folder)
        for number in versions:
            self._load(service.llm, number)
        for model in (service.admission, service.router, service.router_unary):
            self._load(model, 1)

    def close(self) -> None:
        for lock in self._locks.values():
            lock.release()
        self._live.close()

    def die(self, owner: str) -> None:
        """The process ends; the server does not notice."""
        self._locks.pop(owner).release()

    def lives(self, owner: str) -> bool:
        return owner in self._locks

    def publish(self, owner: str, *, phase: str = "ready", **report: object) -> None:
        """Have a version publish its section."""
        self._live.writer(owner).publish({"phase": phase, **report})

    def live(self) -> bool:
        return self.answering

    def index(self) -> list[IndexEntry]:
        if not self.answering:
            raise OperationError("the server does not answer")
        return [IndexEntry(model, number, "READY", "") for model, number in sorted(self.ready)]

    def ready_versions(self, model: str) -> list[int]:
        return [entry.version for entry in self.index() if entry.model == model]

    def set_versions(self, service: Service, model: str, versions: Iterable[int]) -> None:
        wanted = set(versions)
        self.calls.append((model, tuple(sorted(wanted))))
        new = wanted - set(self.ready_versions(model))
        if new and model in self.broken:
            raise LoadError(self.broken[model])
        for number in set(self.ready_versions(model)) - wanted:
            self._drop(model, number)
        for number in new:
            self._load(model, number)

    def unload(self, model: str) -> None:
        self.calls.append((model, ()))
        for number in self.ready_versions(model):
            self._drop(model, number)

    def wait_unloaded(self, model: str, timeout: float) -> bool:
        return not self.ready_versions(model)

    def _owner(self, model: str, number: int) -> str:
        if model == self.service.llm:
            return version_owner(number)
        return next(dict(place.owners)[number] for place in places(self.service, ()) if place.model == model)

    def _load(self, model: str, number: int) -> None:
        owner = self._owner(model, number)
        lock = ProcessLock(self.service.process_lock(owner))
        lock.acquire()
        self._locks[owner] = lock
        self.ready.add((model, number))
        if model == self.service.llm:
            self.publish(owner, phase="ready")

    def _drop(self, model: str, number: int) -> None:
        self.ready.discard((model, number))
        lock = self._locks.pop(self._owner(model, number), None)
        if lock is not None:
            lock.release()
