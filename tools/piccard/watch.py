"""Notices processes that died or hang and starts them again, and ends those whose version was retired."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from piccard_contract.home import Service, version_owner
from piccard_contract.lifecycle import SERVING_STATES, ServiceState, VersionState
from piccard_contract.live_state import LiveState, Section
from piccard_contract.process_lock import holder_pid, is_held

from piccard.errors import OperationError
from piccard.places import Place, places
from piccard.policy_store import policy_in_use
from piccard.revival import GIVE_UP_AFTER, Revival
from piccard.revival_counts import RevivalCounts
from piccard.state_store import StateStore
from piccard.stillness import Signs, Stillness
from piccard.triton_control import TritonControl
from piccard.version_loading import move, revive_version, roll

# Seconds without a request after which a draining version that the server does not unload is ended.
DRAIN_QUIET = 10.0

# Standing still for less is not worth reading the policy for.
_SUSPICIOUS = 1.0

Tell = Callable[[str], None]


class Watch:
    """Looks after the processes of a server; each start runs in a thread of its own.

    A process is known by the lock that it holds while it lives. One whose lock was never seen held, and which the
    server does not call ready, is still starting.

    Args:
        control: of the server.
        tell: takes each line for people.
        counts: of what was started again, for status and metrics.
        ending: set once the server is to end, when nothing is started any more.
        limit: starts in a row that were no use, after which a process is given up.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        control: TritonControl,
        tell: Tell,
        counts: RevivalCounts,
        ending: threading.Event,
        limit: int = GIVE_UP_AFTER,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._control = control
        self._tell = tell
        self._counts = counts
        self._ending = ending
        self._limit = limit
        # Of folders of places, by the place's name.
        self._seen: set[tuple[str, int]] = set()
        self._dead: set[tuple[str, int]] = set()
        # Places that a thread is at.
        self._busy: set[str] = set()
        self._revivals: dict[str, Revival] = {}
        self._stuck: set[str] = set()
        self._stillness: dict[str, Stillness] = {}
        self._quiet_since: dict[tuple[str, str, int], float] = {}

    def look(self, services: list[Service]) -> None:
        """One look at all processes of `services`."""
        for place in _places_of(services):
            self._look_at(place)

    def learn(self, services: list[Service]) -> None:
        """Take what the server calls ready for started, also where it died before anybody looked."""
        ready = {(entry.model, entry.version) for entry in self._control.index() if entry.ready}
        for place in _places_of(services):
            self._seen |= {(place.full_name, number) for number, _ in place.owners if (place.model, number) in ready}

    def expect(self, services: list[Service]) -> None:
        """Take every version that is to serve for started: another supervisor may have died while it revived one."""
        for place in _places_of(services):
            if not place.is_version and not place.living():
                self._seen.add((place.full_name, place.number))
            if place.is_version:
                self._seen |= {(place.full_name, number) for number, _ in place.owners if self._wanted(place, number)}

    def end_stuck(self, services: list[Service]) -> None:
        """End processes that stand still for longer than the policy allows; being dead, they are revived.

        A version stands still where its engine does; a router or admission, where it publishes nothing any more.
        """
        for service in services:
            if not StateStore(service).exists:
                continue
            for section in _sections(service):
                if section.alive and section.data.get("phase", "ready") == "ready":
                    self._end_if_stuck(service, section)

    def retire_drained(self, services: list[Service]) -> None:
        """Mark versions retired whose last stream is over, and failed those that were given up and are not stable."""
        for service in services:
            store = StateStore(service)
            if not store.exists:
                continue
            state = store.read()
            dropped = self._dropped(service, state)
            for number, record in state.versions.items():
                name = f"{service.name}/{version_owner(number)}"
                if record.state is VersionState.RETIRED:
                    self._revivals.pop(name, None)
                elif record.state in SERVING_STATES and number != state.stable and (name, number) in self._dead:
                    self._fail_if_given_up(store, number, self._revival(name).given_up)
                if record.state is not VersionState.DRAINING:
                    continue
                if not is_held(service.process_lock(version_owner(number))):
                    move(store, number, VersionState.RETIRED)
                    self._tell(f"{service.name}: version {number} is retired")
                elif number in dropped:
                    self._end_if_quiet(service, number)

    def _dropped(self, service: Service, state: ServiceState) -> set[int]:
        """The draining versions that the server has let go of."""
        draining = {number for number, record in state.versions.items() if record.state is VersionState.DRAINING}
        return draining - set(self._control.ready_versions(service.llm)) if draining else draining

    def given_up(self) -> dict[str, str]:
        """Why nobody starts a process any more, by `service/owner`."""
        return {name: revival.given_up for name, revival in list(self._revivals.items()) if revival.given_up}

    def waiting(self) -> dict[str, float]:
        """Seconds until a dead process is started again, by `service/owner`."""
        now = self._clock()
        dead = {name for name, _ in list(self._dead)}
        left = {name: revival.seconds_left(now) for name, revival in list(self._revivals.items()) if name in dead}
        return {name: seconds for name, seconds in left.items() if seconds is not None}

    def _look_at(self, place: Place) -> None:
        now = self._clock()
        held = place.living()
        self._seen |= {(place.full_name, number) for number in held}
        if place.full_name in self._busy:
            return
        self._dead -= {(place.full_name, number) for number in held}
        dead = [number for number, _ in place.owners if (place.full_name, number) in self._dead]
        gone = [number for number, _ in place.owners if number not in held and (place.full_name, number) in self._seen]
        revival = self._revival(place.full_name)
        if dead:
            if revival.due(now):
                self._spawn(self._start, place, dead[0])
            elif held and revival.given_up:
                # A step that somebody brought back in its other folder.
                self._spawn(self._forget_unwanted, place, dead[0])
        elif gone:
            self._spawn(self._examine, place, gone[0])
        elif held and (not revival.given_up or _serves(place)):
            revival.alive(now)

    def _spawn(self, work: Callable[[Place, int], None], place: Place, number: int) -> None:
        self._busy.add(place.full_name)
        thread = threading.Thread(
            target=self._work, args=(work, place, number), name=f"revive-{place.full_name}", daemon=True
        )
        thread.start()

    def _work(self, work: Callable[[Place, int], None], place: Place, number: int) -> None:
        try:
            work(place, number)
        except OperationError:
            # The server does not answer; it is looked at again.
            pass
        except OSError as error:
            self._tell(f"{place.full_name} is looked after again later: {error}")
        finally:
            self._busy.discard(place.full_name)

    def _examine(self, place: Place, number: int) -> None:
        """Find out whether a process that is gone was let go on purpose."""
        if self._ending.is_set() or not self._wanted(place, number):
            self._seen.discard((place.full_name, number))
            return
        revival = self._revival(place.full_name)
        revival.dead(self._clock())
        self._dead.add((place.full_name, number))
        if revival.given_up:
            self._give_up(place, revival.given_up)
            return
        what = "was ended, since it hung" if place.full_name in self._stuck else "died"
        seconds = revival.seconds_left(self._clock()) or 0.0
        when = f" in {seconds:.0f} s" if seconds >= 1 else ""
        self._tell(f"{place.service.name}: the process of {place.name} {what}; starting it again{when}")
        if revival.due(self._clock()):
            self._start(place, number)

    def _start(self, place: Place, number: int) -> None:
        if self._ending.is_set():
            return
        if not self._wanted(place, number):
            self._forget(place, number)
            return
        revival = self._revival(place.full_name)
        revival.begin()
        try:
            if place.is_version:
                revive_version(self._control, place.service, number)
            else:
                other = roll(self._control, place.service, place.model, dead=number)
                self._seen.discard((place.full_name, number))
                self._seen.add((place.full_name, other))
        except OSError:
            # The disk's fault, and not that of what was to be started.
            revival.put_off(self._clock())
            raise
        except OperationError as error:
            if self._ending.is_set() or not self._control.live():
                # The server's fault, and not that of what it was to start.
                revival.put_off(self._clock())
                return
            self._count(place)
            revival.failed(self._clock(), str(error))
            if revival.given_up:
                self._give_up(place, revival.given_up)
            else:
                self._tell(f"{place.full_name} could not be started: {error}")
        else:
            self._count(place)
            revival.started(self._clock())
            self._dead = {(name, folder) for name, folder in self._dead if name != place.full_name}
            self._tell(f"{place.service.name}: {place.name} is back")

    def _count(self, place: Place) -> None:
        self._counts.add(place.service.name, place.name, stuck=place.full_name in self._stuck)
        self._stuck.discard(place.full_name)

    def _give_up(self, place: Place, reason: str) -> None:
        """Nobody starts it any more; one that is not stable has failed, so that nothing counts on it."""
        self._tell(f"{place.full_name} is given up: {reason}; `piccard revive {place.name}` tries again")
        store = StateStore(place.service)
        if place.is_version and store.read().stable != place.number:
            self._fail_if_given_up(store, place.number, reason)

    def _fail_if_given_up(self, store: StateStore, number: int, reason: str) -> None:
        """A version that was given up has failed, unless it is stable: that role ends with a promotion alone."""
        if not reason:
            return
        # Only then is it looked at no more: on a full disk the move is tried again.
        with suppress(OperationError):
            move(store, number, VersionState.FAILED, reason)
        name = f"{store.service.name}/{version_owner(number)}"
        self._seen.discard((name, number))
        self._dead.discard((name, number))

    def _forget_unwanted(self, place: Place, number: int) -> None:
        if not self._wanted(place, number):
            self._forget(place, number)

    def _forget(self, place: Place, number: int) -> None:
        self._seen.discard((place.full_name, number))
        self._dead.discard((place.full_name, number))

    def _wanted(self, place: Place, number: int) -> bool:
        """Whether a process that is gone was not let go on purpose."""
        if not place.is_version:
            # Newer servers do not call a dead process ready.
            return number in self._control.ready_versions(place.model) or not place.living()
        record = StateStore(place.service).read().versions.get(number)
        return record is not None and record.state in SERVING_STATES

    def _revival(self, name: str) -> Revival:
        return self._revivals.setdefault(name, Revival(self._limit))

    def _end_if_stuck(self, service: Service, section: Section) -> None:
        # Of a router's two folders only one is in use.
        name = f"{service.name}/{section.owner.removesuffix('.2')}"
        signs = Signs(
            section.pid,
            section.updated_at,
            bool(section.data.get("busy", False)),
            int(section.data.get("beats", 0)),
        )
        still = self._stillness.setdefault(name, Stillness()).look(self._clock(), signs)
        if still < _SUSPICIOUS or still < (limit := policy_in_use(service).deadlines.step):
            return
        self._tell(f"{service.name}: {section.owner} gave no sign of life for {limit:g} s; it is ended")
        self._stuck.add(name)
        if holder_pid(service.process_lock(section.owner)) == section.pid:
            with suppress(ProcessLookupError):
                os.kill(section.pid, signal.SIGKILL)

    def _end_if_quiet(self, service: Service, version: int) -> None:
        """End a draining process without requests: the server keeps one whose request was cancelled as it ended.

        One that the server has told to end is left alone, however long it takes: the server waits for its answer, and a
        process that is killed while it gives it takes the whole server along (server 2.51, lock_exception).
        """
        key = (service.name, service.llm, version)
        live = LiveState(service.live_state, service.run_folder)
        try:
            section = live.read(version_owner(version))
        finally:
            live.close()
        ends = section is not None and section.data.get("phase") == "ending"
        if section is None or not section.alive or ends or requests_of(section.data):
            self._quiet_since.pop(key, None)
            return
        since = self._quiet_since.setdefault(key, self._clock())
        holder = holder_pid(service.process_lock(version_owner(version)))
        if self._clock() - since >= DRAIN_QUIET and holder == section.pid:
            self._quiet_since.pop(key, None)
            with suppress(ProcessLookupError):
                os.kill(section.pid, signal.SIGKILL)


def _serves(place: Place) -> bool:
    """Whether a process that lives has come up: that of a version may fail in its load yet."""
    if not place.is_version:
        return True
    ready = (section for section in _sections(place.service) if section.owner == place.name and section.alive)
    return any(section.data.get("phase") == "ready" for section in ready)


def _places_of(services: Iterable[Service]) -> list[Place]:
    stores = [(service, StateStore(service)) for service in services]
    # A new service's publication may have been undone.
    return [place for service, store in stores if store.exists for place in places(service, store.read().loaded())]


def _sections(service: Service) -> list[Section]:
    """What the processes of the server published."""
    live = LiveState(service.live_state, service.run_folder)
    try:
        return [section for section in live.sections() if section.owner != "supervisor"]
    finally:
        live.close()


def requests_of(report: dict[str, Any]) -> int:
    """Requests that a version or a router reports."""
    in_flight = sum(int(count) for count in report.get("in_flight", {}).values())
    return int(report.get("running", 0)) + int(report.get("waiting", 0)) + in_flight
