"""Publishes a process's report in its section of the state file, twice a second."""

import threading
from collections.abc import Callable
from typing import Any

from piccard_contract.live_state import LiveStateError, SectionWriter
from piccard_contract.reports import Samples

from piccard_canary.counters import newest_versions

INTERVAL = 0.5

# Versions whose counts are published when those of all do not fit a section.
_FEWER = (32, 16, 8, 4, 2, 1)


class Publisher:
    """A thread that writes what `report` returns.

    Args:
        report: the section's content; its `samples` may be thinned out to fit.
        also: further work of each round.
        log: takes a sentence for the server's log.
    """

    def __init__(
        self,
        writer: SectionWriter,
        report: Callable[[], dict[str, Any]],
        log: Callable[[str], None],
        *,
        also: Callable[[], None] = lambda: None,
        interval: float = INTERVAL,
    ) -> None:
        self._writer = writer
        self._report = report
        self._log = log
        self._also = also
        self._interval = interval
        self._stop = threading.Event()
        self._failed = ""
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)

    def start(self) -> None:
        """Publish once on this thread, then go on on another."""
        self.publish()
        self._thread.start()

    def stop(self) -> None:
        """Publish a last time and end the thread."""
        self._stop.set()
        self._thread.join(timeout=5.0)

    def publish(self) -> None:
        """Publish now."""
        report = self._report()
        samples: Samples = report.get("samples", [])
        for keep in (None, *_FEWER):
            if keep is not None:
                report["samples"] = newest_versions(samples, keep)
            try:
                self._writer.publish(report)
            except LiveStateError:
                continue
            return
        raise LiveStateError("the report does not fit its section even without older versions")

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self._round()
        self._round()

    def _round(self) -> None:
        try:
            self.publish()
            self._also()
        except Exception as error:
            # Said once, not twice a second.
            if self._failed != repr(error):
                self._log(f"the report of this process could not be published: {error!r}")
            self._failed = repr(error)
        else:
            self._failed = ""
