"""The services of a home, and how each routes."""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from piccard_contract.file_watch import FileWatch
from piccard_contract.home import Service
from piccard_contract.lifecycle import ServiceState
from piccard_contract.policy import Policy, PolicyError, read_policy
from pydantic import ValidationError

# Seconds for which the list of services is kept.
_KEEP = 1.0


class Offer:
    """One service and its policy as it is now; a broken edit leaves the last good one."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._policy = Policy()
        self._watch = FileWatch(service.policy_file)
        self._created = int(time.time())
        self._serving: list[int] = []
        self._state_watch = FileWatch(service.state_json)

    @property
    def policy(self) -> Policy:
        if self._watch.changed():
            # Admission tells of a broken one.
            with suppress(PolicyError, OSError):
                self._policy = read_policy(self.service.policy_file)
        return self._policy

    @property
    def created(self) -> int:
        """Unix time at which it was first told of."""
        return self._created

    @property
    def serving(self) -> list[int]:
        """The versions that requests without a pin go to: stable, and the canary where there is one."""
        if self._state_watch.changed():
            try:
                state = ServiceState.model_validate_json(self.service.state_json.read_bytes())
            except (OSError, ValidationError):
                return self._serving
            self._serving = [number for number in (state.stable, state.canary) if number is not None]
        return self._serving

    def routing_headers(self) -> Iterable[str]:
        """Names that the router looks at."""
        return (self.policy.header, *self.policy.sticky_keys)


class Catalogue:
    """What a home offers; services that are published while this runs are found within a second.

    Args:
        home: the home's folder.
    """

    def __init__(self, home: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._home = home
        self._clock = clock
        self._offers: dict[str, Offer] = {}
        self._looked = float("-inf")

    def offers(self) -> dict[str, Offer]:
        """Name -> service."""
        now = self._clock()
        if now - self._looked >= _KEEP:
            self._looked = now
            self._offers = {name: self._offers.get(name) or Offer(Service(self._home, name)) for name in self._names()}
        return self._offers

    def find(self, model: str) -> Offer | None:
        """The service that a request's `model` names."""
        return self.offers().get(model)

    def _names(self) -> list[str]:
        found = []
        for path in sorted((self._home / "state").glob("*/state.json")):
            try:
                found.append(Service(self._home, path.parent.name).name)
            except ValueError:
                # A folder of another name is none.
                continue
        return found
