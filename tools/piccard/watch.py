"""Notices processes that died and starts them again, and ends those whose version was retired."""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from piccard_contract.home import Service, version_owner
from piccard_contract.lifecycle import SERVING_STATES, VersionState
from piccard_contract.live_state import LiveState
from piccard_contract.process_lock import holder_pid, is_held

from piccard.errors import OperationError
from piccard.state_store import StateStore
from piccard.triton_control import TritonControl
from piccard.version_loading import move, revive_version, roll

LONGEST_BACKOFF = 60.0

# Seconds without a request after which a draining version that the server does not unload is ended.
DRAIN_QUIET = 5.0

Tell = Callable[[str], None]


class Watch:
    """Looks after the processes of a server; each revival runs in a thread of its own.

    A process is known by the lock that it holds while it lives. One whose lock was never seen held, and which the
    server does not call ready, is still starting.

    Args:
        control: of the server.
        tell: takes each line for people.
        revivals: counts what was started again, by `service/owner`.
        ending: set once the server is to end, when nothing is started any more.
    """

    def __init__(self, control: TritonControl, tell: Tell, revivals: dict[str, int], ending: threading.Event) -> None:
        self._control = control
        self._tell = tell
        self._revivals = revivals
        self._ending = ending
        self._seen: set[tuple[str, str, int]] = set()
        self._busy: set[tuple[str, str, int]] = set()
        self._not_before: dict[tuple[str, str, int], float] = {}
        self._quiet_since: dict[tuple[str, str, int], float] = {}

    def look(self, services: list[Service]) -> None:
        """One look at all processes of `services`."""
        for service in services:
            if not StateStore(service).exists:
                # A publication of a new service that was undone.
                continue
            for model, version, owner in _processes(service):
                key = (service.name, model, version)
                if is_held(service.process_lock(owner)):
                    self._seen.add(key)
                elif key in self._seen and key not in self._busy and time.monotonic() >= self._not_before.get(key, 0):
                    self._busy.add(key)
                    threading.Thread(target=self._revive, args=(service, *key[1:], owner), daemon=True).start()

    def learn(self, services: list[Service]) -> None:
        """Take what the server calls ready for started, also where it died before anybody looked."""
        ready = {(entry.model, entry.version) for entry in self._control.index() if entry.ready}
        for service in services:
            models = (service.llm, service.admission, service.router, service.router_unary)
            self._seen |= {(service.name, model, version) for model, version in ready if model in models}

    def retire_drained(self, services: list[Service]) -> None:
        """Mark versions retired whose last stream is over."""
        for service in services:
            store = StateStore(service)
            if not store.exists:
                continue
            for number, record in store.read().versions.items():
                if record.state is not VersionState.DRAINING:
                    continue
                if not is_held(service.process_lock(version_owner(number))):
                    move(store, number, VersionState.RETIRED)
                    self._tell(f"{service.name}: version {number} is retired")
                else:
                    self._end_if_quiet(service, number)

    def _end_if_quiet(self, service: Service, version: int) -> None:
        """End a draining process without requests: the server keeps one whose request was cancelled as it ended."""
        key = (service.name, service.llm, version)
        live = LiveState(service.live_state, service.run_folder)
        try:
            section = live.read(version_owner(version))
        finally:
            live.close()
        if section is None or not section.alive or requests_of(section.data):
            self._quiet_since.pop(key, None)
            return
        since = self._quiet_since.setdefault(key, time.monotonic())
        holder = holder_pid(service.process_lock(version_owner(version)))
        if time.monotonic() - since >= DRAIN_QUIET and holder == section.pid:
            self._quiet_since.pop(key, None)
            with suppress(ProcessLookupError):
                os.kill(section.pid, signal.SIGKILL)

    def _revive(self, service: Service, model: str, version: int, owner: str) -> None:
        key = (service.name, model, version)
        try:
            if self._ending.is_set() or not self._wanted(service, model, version):
                self._seen.discard(key)
                return
            self._tell(f"{service.name}: the process of {owner} died; starting it again")
            name = f"{service.name}/{owner}"
            self._revivals[name] = self._revivals.get(name, 0) + 1
            self._not_before[key] = time.monotonic() + min(LONGEST_BACKOFF, 0.5 * 2 ** self._revivals[name])
            if model == service.llm:
                revive_version(self._control, service, version)
            else:
                roll(self._control, service, model)
                self._seen.discard(key)
            self._tell(f"{service.name}: {owner} is back")
        except OperationError as error:
            if not self._ending.is_set() and self._control.live():
                self._give_up(service, model, version, str(error))
        finally:
            self._busy.discard(key)

    def _wanted(self, service: Service, model: str, version: int) -> bool:
        """Whether a process that is gone was not let go on purpose."""
        if model != service.llm:
            return version in self._control.ready_versions(model)
        record = StateStore(service).read().versions.get(version)
        return record is not None and record.state in SERVING_STATES

    def _give_up(self, service: Service, model: str, version: int, reason: str) -> None:
        """A version that cannot be started again has failed; stable, routers and admission are tried again."""
        store = StateStore(service)
        if model == service.llm and store.read().stable != version:
            self._seen.discard((service.name, model, version))
            move(store, version, VersionState.FAILED, reason)
        self._tell(f"{service.name}: version {version} of {model} cannot be started again: {reason}")


def _processes(service: Service) -> list[tuple[str, int, str]]:
    """(model, version, owner) of every process that `service` may have."""
    found = [(service.llm, number, version_owner(number)) for number in StateStore(service).read().loaded()]
    for model, name in (
        (service.admission, "admission"),
        (service.router, "router"),
        (service.router_unary, "router_unary"),
    ):
        found += [(model, 1, name), (model, 2, f"{name}.2")]
    return found


def requests_of(report: dict[str, Any]) -> int:
    """Requests that a version or a router reports."""
    in_flight = sum(int(count) for count in report.get("in_flight", {}).values())
    return int(report.get("running", 0)) + int(report.get("waiting", 0)) + in_flight
