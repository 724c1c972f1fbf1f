"""A home with a double of its server, on which commands can fail or be killed at any of their writes."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from fake_triton import BAD, FakeControl, FakeTriton
from piccard.doctor import doctor
from piccard.errors import OperationError
from piccard.operation import Operation
from piccard.outcome import Outcome
from piccard.places import Place
from piccard.policy_store import load_policy
from piccard.publish import Publication, publish
from piccard.repository import configured_versions, stable_target
from piccard.revival_counts import RevivalCounts
from piccard.settle import settle
from piccard.startup import Startup
from piccard.state_store import StateStore
from piccard.watch import Watch
from piccard_contract.home import Service
from piccard_contract.lifecycle import KEPT_RETIRED, SERVING_STATES, UNPROVEN_STATES, ServiceState, VersionState
from write_points import Killed, WritePoints

# ("kill" or "fail", the point of the command at which it happens); None for neither.
Fault = tuple[str, int] | None

# What doctor says of a version that waits for a server.
WAITS = "`piccard serve` goes on with it at its next start"


class AlwaysReady:
    """Stands for piccard.readiness.Readiness, which asks a real server."""

    def of(self, service: Service, timeout: float) -> tuple[bool, dict[str, Any]]:
        return True, {"ready": True}


# Starts in a row that are no use, after which the watch gives a process up; few, so that a test gets there soon.
TRIES = 2


class DirectWatch(Watch):
    """Starts what died before it goes on: what its threads would do is met by the same fault as a command."""

    def _spawn(self, work: Callable[[Place, int], None], place: Place, number: int) -> None:
        self._work(work, place, number)


class OperatedService:
    """A service whose server is a double.

    Args:
        home: with versions 1 and 2, both published.

    Attributes:
        points: the writes of the command that runs.
        published: versions of which a command said that they are published.
        given_up: versions that somebody asked to retire.
        lost: versions whose process died or could not be started, until they serve again.
        labels: of every version that the state ever named, by number.
    """

    def __init__(self, home: Path) -> None:
        self.service = Service(home)
        self.store = StateStore(self.service)
        self.server = FakeTriton(self.service)
        self.points = WritePoints()
        self.points.look = self.check_served
        self.points.install()
        self.labels: dict[int, str] = {}
        self.published = {1, 2}
        self.given_up: set[int] = set()
        self.lost: set[int] = set()
        self._now = 0.0
        self._watch = self._new_watch()

    def close(self) -> None:
        self.points.remove()
        self.server.close()

    def publish(self, label: str, fault: Fault = None, *, repairs: bool = True) -> Outcome | None:
        """Publish a version; a label that starts with BAD is of one that fails its probe."""
        publication = Publication(Path("scripted"), label, {"runner": "scripted", "linked": True})
        outcome = self.run(
            lambda op: publish(op, publication), fault, repairs=repairs, may_disagree=label.startswith(BAD)
        )
        if outcome is not None:
            self.published.add(outcome.after["version"])
        return outcome

    def run(
        self,
        command: Callable[[Operation], Any],
        fault: Fault = None,
        *,
        repairs: bool = True,
        may_disagree: bool = False,
    ) -> Any:
        """Run a command and check that everything agrees afterwards.

        Args:
            repairs: a command that was killed is followed by `doctor --repair`, else by a restart of the server.
            may_disagree: the command fails by itself too, and two failures at once may need a repair.

        Returns:
            its outcome; None where it did not come to its end.
        """
        outcome = error = None
        try:
            with self.armed(fault):
                outcome = command(self.operation())
        except (OperationError, OSError) as caught:
            error = caught
        except Killed:
            self.recover(repairs=repairs)
        if error is not None:
            self.check_disk()
            if self.points.control_failed or may_disagree:
                # What the server did then is not known to the command.
                self.recover(repairs=repairs)
        self.look_after()
        self.check()
        return outcome

    def operation(self) -> Operation:
        return Operation(self.service, self.store, self._control(), dry_run=False, tell=lambda _: None)

    def armed(self, fault: Fault) -> AbstractContextManager[None]:
        kind, at = fault or ("", -1)
        return self.points.armed(kill_at=at if kind == "kill" else -1, fail_at=at if kind == "fail" else -1)

    def recover(self, *, repairs: bool) -> None:
        """What an operator does after a command was killed, once the last streams are over."""
        self.server.finish_streams()
        if not repairs:
            self._restart_after_kill()
            return
        self.look_after()
        left, _ = doctor(self.operation(), repair=True)
        assert not [finding for finding in left if finding.remedy != WAITS], left

    def restart(self, fault: Fault = None) -> None:
        """End the server and run what `piccard serve` does; killed, it takes the server along and starts anew."""
        self.server.kill()
        try:
            with self.armed(fault):
                self._watch = self._new_watch()
                settle([self.service], lambda _: None)
                self.server.start()
                addresses = dict.fromkeys(("http", "grpc", "metrics", "health"), "127.0.0.1:1")
                ready: Any = AlwaysReady()
                Startup(self._control(), ready, addresses, lambda _: None, threading.Event()).run([self.service])
        except (Killed, OSError):
            self.restart()
        self.look_after()

    def _restart_after_kill(self) -> None:
        # The points are those of the command that was killed.
        passed = self.points.passed
        self.restart()
        self.points.passed = passed

    def dies(self, version: int, fault: Fault = None, *, for_good: bool, repairs: bool = True) -> None:
        """The process of a version dies, and the supervisor starts it again or gives it up.

        Args:
            fault: what happens to the supervisor. After a kill another one takes the server over.
            for_good: it cannot be started any more, until `broken` of the server is mended.
            repairs: as for `run`.
        """
        self.look_after()
        self.lost.add(version)
        if for_good:
            self.server.broken.add(version)
        self.server.die(version)
        try:
            with self.armed(fault):
                self._bring_back()
        except OSError:
            # The supervisor tells of it, and looks again.
            pass
        except Killed:
            self._watch = self._new_watch()
            self._watch.expect([self.service])
            if not repairs:
                self._restart_after_kill()
        self.look_after()

    def living(self) -> set[int]:
        """Versions whose process can die."""
        return self.server.loaded - self.server.dead()

    def stable_is_lost(self) -> bool:
        """Whether the process of stable died, or could not be started."""
        stable = self.store.read().stable
        return self.server.running and stable not in self.living()

    def look_after(self) -> None:
        """What the supervisor does twice a second, until there is nothing left to do."""
        if self.server.running:
            self._bring_back()

    def _bring_back(self) -> None:
        self._watch.retire_drained([self.service])
        for _ in range(4 * TRIES):
            self._watch.look([self.service])
            if not self._watch.waiting():
                break
            # Longer than any pause between two starts.
            self._now += 61.0
        else:
            raise AssertionError("what died is neither started nor given up")
        self._watch.retire_drained([self.service])
        self.server.report(self._watch.given_up())

    def _new_watch(self) -> Watch:
        control: Any = FakeControl(self.server, self.points.control)
        return DirectWatch(
            control, lambda _: None, RevivalCounts(), threading.Event(), limit=TRIES, clock=lambda: self._now
        )

    def _control(self) -> Any:
        return FakeControl(self.server, self.points.control) if self.server.running else None

    def check_served(self) -> None:
        """At any time: the link names a version that is there, loaded, and that routers may send requests to."""
        target = stable_target(self.service)
        assert target is not None
        assert self.service.version_folder(target).is_dir()
        if self.server.loaded and target not in self.lost:
            assert target in self.server.loaded, f"the link names {target}, loaded are {self.server.loaded}"
            assert self.store.read().versions[target].state in SERVING_STATES

    def check(self) -> None:
        """After every command: state, link, configuration, policy and server agree, and nothing is lost."""
        self.check_disk()
        state = self.store.read()
        if self.server.running:
            serving = {n for n, r in state.versions.items() if r.state in SERVING_STATES}
            assert not self.server.dead() & serving
            # What died again after each start has failed, and is loaded yet.
            assert self.server.loaded - self.server.dead() == serving
            self.lost -= serving
            assert not [n for n, r in state.versions.items() if r.state in UNPROVEN_STATES]
            self.check_served()
        for number in self.published:
            if number in self.given_up and number not in sorted(self.given_up)[-KEPT_RETIRED:]:
                # Retired so long ago that it may be forgotten.
                continue
            assert (self.service.version_folder(number) / "version.yaml").is_file()
            if number not in self.given_up:
                assert state.versions[number].state not in (VersionState.DRAINING, VersionState.RETIRED)

    def check_disk(self) -> None:
        """State, link, configuration and policy agree, and no number was used twice."""
        state = self.store.read()
        assert stable_target(self.service) == state.stable
        assert configured_versions(self.service) == [state.stable]
        assert load_policy(self.service).canary == state.canary
        self._check_roles(state)
        for number, record in state.versions.items():
            assert self.labels.setdefault(number, record.label) == record.label, f"number {number} was used twice"
        assert max(self.labels) < state.next_version

    def _check_roles(self, state: ServiceState) -> None:
        roles = {
            VersionState.STABLE: state.stable,
            VersionState.CANARY: state.canary,
            VersionState.PREVIOUS: state.previous,
        }
        assert state.stable is not None
        named = [number for number in roles.values() if number is not None]
        assert len(set(named)) == len(named), "a version has two roles"
        for role, number in roles.items():
            holders = {n for n, record in state.versions.items() if record.state is role}
            assert holders <= {number}, f"{role} are {holders}, the state names {number}"
            if number is not None and not holders:
                assert state.versions[number].state in {VersionState.FAILED, *UNPROVEN_STATES}
