"""Counts what was started again, and tells what was given up, as the contract's metrics."""

import threading
from collections import Counter
from collections.abc import Iterable

from piccard_contract.reports import Samples


class RevivalCounts:
    """How often each process was started again, and why."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str, str]] = Counter()
        # A metric that once said 1 has to say 0 afterwards.
        self._told: set[str] = set()

    def add(self, service: str, owner: str, *, stuck: bool) -> None:
        """A process is started again; it died, or was ended since it hung."""
        with self._lock:
            self._counts[service, owner, "stuck" if stuck else "died"] += 1

    def by_process(self) -> dict[str, int]:
        """Starts by `service/owner`."""
        found: Counter[str] = Counter()
        with self._lock:
            for (service, owner, _), count in self._counts.items():
                found[f"{service}/{owner}"] += count
        return dict(found)

    def samples(self, service: str, given_up: Iterable[str]) -> Samples:
        """The samples of one service. `given_up` names processes as `service/owner`."""
        now = {name for name in given_up if name.startswith(f"{service}/")}
        with self._lock:
            counts = [(key, count) for key, count in sorted(self._counts.items()) if key[0] == service]
            self._told |= now
            told = sorted(name for name in self._told if name.startswith(f"{service}/"))
        samples: Samples = [
            ("piccard_revivals_total", {"service": service, "owner": owner, "cause": cause}, float(count))
            for (_, owner, cause), count in counts
        ]
        return samples + [
            ("piccard_given_up", {"service": service, "owner": name.split("/")[1]}, float(name in now)) for name in told
        ]
