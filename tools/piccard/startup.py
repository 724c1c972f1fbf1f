"""Brings up, after a server's start, what the server did not load by itself."""

import threading
from collections.abc import Callable

from piccard_contract.home import Service
from piccard_contract.lifecycle import UNPROVEN_STATES, VersionState

from piccard.endpoints import endpoints
from piccard.errors import OperationError
from piccard.readiness import Readiness
from piccard.state_store import AnotherAtWorkError, StateStore, operator_lock
from piccard.triton_control import TritonControl
from piccard.version_loading import add_version, drop_failed, load_version, move

# States in which a version was already good when the last server ended.
_PROVEN = frozenset({VersionState.READY, VersionState.CANARY, VersionState.PREVIOUS})


class Startup:
    """Looks whether stable was loaded, then adds the other versions one by one; one that fails harms no other.

    Args:
        control: of the server.
        readiness: asks a service for a token.
        addresses: http, grpc, metrics and health as host:port.
        tell: takes each line for people.
        ending: set once the server is to end.
        taken_over: the server ran before. What has served there is the watch's to bring back, and what is being
            published may be the work of a command.
    """

    def __init__(
        self,
        control: TritonControl,
        readiness: Readiness,
        addresses: dict[str, str],
        tell: Callable[[str], None],
        ending: threading.Event,
        *,
        taken_over: bool = False,
    ) -> None:
        self._control = control
        self._readiness = readiness
        self._addresses = addresses
        self._tell = tell
        self._ending = ending
        self._taken_over = taken_over

    def run(self, services: list[Service]) -> bool:
        """Load what is missing; the first thing that people are told is stable's answer.

        Returns:
            whether it came to its end; False where the server ended meanwhile.
        """
        try:
            for service in services:
                self._start_stable(service)
            for service, version in self._all_missing(services):
                if self._ending.is_set():
                    return False
                self._start_version(service, version)
        except OperationError as error:
            if not self._ending.is_set():
                self._tell(f"loading stopped: {error}")
            return False
        return True

    def _all_missing(self, services: list[Service]) -> list[tuple[Service, int]]:
        if not self._taken_over:
            return [(service, version) for service in services for version in self._missing(service)]
        try:
            # Who publishes holds it; without it, what is half way is nobody's.
            with operator_lock(services[0].home):
                return [(service, version) for service in services for version in self._missing(service)]
        except AnotherAtWorkError as error:
            self._tell(f"versions that are not loaded yet are left to the command at work: {error}")
            return []

    def _start_stable(self, service: Service) -> None:
        store = StateStore(service)
        state = store.read()
        if state.stable is None or self._ending.is_set():
            return
        if not self._taken_over and not self._is_loaded(service, state.stable):
            return
        found = state.versions[state.stable].state
        # A start that loaded it again may have been killed half way.
        if found is VersionState.FAILED or (found in UNPROVEN_STATES and not self._taken_over):
            self._start_version(service, state.stable)
        ready, body = self._readiness.of(service, timeout=60.0)
        if ready:
            self._tell(endpoints(service.name, state.stable, **self._addresses))
        else:
            self._tell(f"{service.name}: stable (version {state.stable}) does not answer: {body['reason']}")

    def _is_loaded(self, service: Service, stable: int) -> bool:
        """Whether the server's start loaded stable; else it is marked failed with the server's reason."""
        entries = [entry for entry in self._control.index() if entry.model == service.llm]
        entry = next((entry for entry in entries if entry.version == stable), None)
        if entry is not None and entry.ready:
            return True
        self._fail(service, stable, (entry.reason if entry else "") or "the server does not know it; see its log")
        return False

    def _missing(self, service: Service) -> list[int]:
        state = StateStore(service).read()
        roles = {state.canary, state.previous}
        wanted = UNPROVEN_STATES if self._taken_over else _PROVEN | UNPROVEN_STATES
        return [
            number
            for number, record in sorted(state.versions.items(), key=lambda item: (item[0] not in roles, item[0]))
            if number != state.stable
            and (record.state in wanted or (record.state is VersionState.FAILED and number in roles))
        ]

    def _start_version(self, service: Service, version: int) -> None:
        record = StateStore(service).read().versions.get(version)
        if record is None or record.state not in (*_PROVEN, *UNPROVEN_STATES, VersionState.FAILED):
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
