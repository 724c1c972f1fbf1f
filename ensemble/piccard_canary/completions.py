"""What requests came to, by tenant: a router counts it, and admission settles by it."""

import threading
from collections.abc import Iterable

from piccard_contract.live_state import Section
from piccard_contract.reports import tenant_key
from piccard_contract.request import Charge

# Tenants that a router tells of: a section of the state file has an end.
MOST_TENANTS = 256


class Completions:
    """What the requests of one router came to since its start, of the tenants that were heard of last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, tuple[int, int]] = {}

    def add(self, tenant: str, charge: Charge | None, used: int) -> None:
        """A request of `tenant` is over that took `used` tokens; one without a charge is nobody's business."""
        if charge is None:
            return
        key = tenant_key(tenant)
        with self._lock:
            expected, came = self._totals.pop(key, (0, 0))
            self._totals[key] = expected + charge.tokens, came + used
            if len(self._totals) > MOST_TENANTS:
                del self._totals[next(iter(self._totals))]

    def totals(self) -> dict[str, tuple[int, int]]:
        """Tenant key -> tokens that were taken for its requests, tokens that these came to."""
        with self._lock:
            return dict(self._totals)


class Settlements:
    """Reads from the routers' sections what is to be given back.

    A router's counts end with its process: one that stands in its place counts from 0. What it had counted before this
    was made is settled already, or was taken by somebody who is gone.
    """

    def __init__(self, sections: Iterable[Section]) -> None:
        self._seen: dict[str, tuple[int, dict[str, tuple[int, int]]]] = {}
        self.take(sections)

    def take(self, sections: Iterable[Section]) -> dict[str, int]:
        """Tenant key -> tokens to give back since the last call; less than 0 where more came than was taken."""
        back: dict[str, int] = {}
        for section in sections:
            told = section.data.get("completions")
            if told is None:
                continue
            totals = {key: (int(expected), int(came)) for key, (expected, came) in told.items()}
            pid, before = self._seen.get(section.owner, (section.pid, {}))
            self._seen[section.owner] = section.pid, totals
            for key, (expected, came) in totals.items():
                past = before.get(key, (0, 0)) if pid == section.pid else (0, 0)
                if expected < past[0]:
                    # It was forgotten meanwhile, and counted anew.
                    past = 0, 0
                if tokens := (expected - past[0]) - (came - past[1]):
                    back[key] = back.get(key, 0) + tokens
        return back
