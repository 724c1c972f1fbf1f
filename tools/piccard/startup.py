"""Brings up, after a server's start, what the server did not load by itself."""

import threading
from collections.abc import Callable

from piccard_contract.home import Service
from piccard_contract.lifecycle import VersionState

from piccard.endpoints import endpoints
from piccard.errors import OperationError
from piccard.readiness import Readiness
from piccard.state_store import StateStore
from piccard.triton_control import TritonControl
from piccard.version_loading import add_version, drop_failed, load_version, move

# States in which a version was already good when the last server ended.
_PROVEN = (VersionState.READY, VersionState.CANARY, VersionState.PREVIOUS)
_UNPROVEN = (VersionState.STAGED, VersionState.LOADING, VersionState.PROBING)


class Startup:
    """Looks whether stable was loaded, then adds the other versions one by one; one that fails harms no other.

    Args:
        control: of the server.
        readiness: asks a service for a token.
        addresses: http, grpc, metrics and health as host:port.
        tell: takes each line for people.
        ending: set once the server is to end.
    """

    def __init__(
        self,
        control: TritonControl,
        readiness: Readiness,
        addresses: dict[str, str],
        tell: Callable[[str], None],
        ending: threading.Event,
    ) -> None:
        self._control = control
        self._readiness = readiness
        self._addresses = addresses
        self._tell = tell
        self._ending = ending

    def run(self, services: list[Service]) -> bool:
        """Load what is missing; the first thing that people are told is stable's answer.

        Returns:
            whether it came to its end; False where the server ended meanwhile.
        """
        try:
            for service in services:
                self._start_stable(service)
            for service in services:
                for version in self._missing(service):
                    if self._ending.is_set():
                        return False
                    self._start_version(service, version)
        except OperationError as error:
            if not self._ending.is_set():
                self._tell(f"loading stopped: {error}")
            return False
        return True

    def _start_stable(self, service: Service) -> None:
        store = StateStore(service)
        state = store.read()
        if state.stable is None or self._ending.is_set():
            return
        entries = [entry for entry in self._control.index() if entry.model == service.llm]
        entry = next((entry for entry in entries if entry.version == state.stable), None)
        if entry is None or not entry.ready:
            reason = (entry.reason if entry else "") or "the server does not know it; see its log"
            self._fail(service, state.stable, reason)
            return
        if state.versions[state.stable].state is VersionState.FAILED:
            self._start_version(service, state.stable)
        ready, body = self._readiness.of(service, timeout=60.0)
        if ready:
            self._tell(endpoints(service.name, state.stable, **self._addresses))
        else:
            self._tell(f"{service.name}: stable (version {state.stable}) does not answer: {body['reason']}")

    def _missing(self, service: Service) -> list[int]:
        state = StateStore(service).read()
        roles = {state.canary, state.previous}
        return [
            number
            for number, record in sorted(state.versions.items(), key=lambda item: (item[0] not in roles, item[0]))
            if number != state.stable
            and (record.state in _PROVEN + _UNPROVEN or (record.state is VersionState.FAILED and number in roles))
        ]

    def _start_version(self, service: Service, version: int) -> None:
        record = StateStore(service).read().versions.get(version)
        if record is None or record.state not in (*_PROVEN, *_UNPROVEN, VersionState.FAILED):
            # It was retired since the list was made.
            return
        try:
            if record.state in _PROVEN:
                add_version(self._control, service, version)
            else:
                load_version(self._control, service, version, self._tell)
        except OperationError as error:
            if self._ending.is_set() or not self._control.live():
                return
            drop_failed(self._control, service, version)
            self._fail(service, version, str(error))
        else:
            self._tell(f"{service.name}: version {version} ({record.label}) is loaded")

    def _fail(self, service: Service, version: int, reason: str) -> None:
        move(StateStore(service), version, VersionState.FAILED, reason)
        self._tell(f"{service.name}: version {version} failed: {reason}")
