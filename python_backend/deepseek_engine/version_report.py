"""Publishes what a version is and does in its section of the state file."""

import logging
import threading
from collections.abc import Callable
from typing import Any

from piccard_contract.live_state import SectionWriter
from piccard_contract.reports import VersionReport

_log = logging.getLogger(__name__)

# Seconds between two looks at the figures, and the longest time that a section stays as it is.
LOOK_SECONDS = 0.05
PUBLISH_SECONDS = 0.5
PROGRESS_STEP = 0.01


class ReportPublisher:
    """Keeps a version's section current on a thread of its own.

    Figures that changed are published within `LOOK_SECONDS`, everything at least every `PUBLISH_SECONDS`.

    Args:
        writer: the version's section.
        report: its first content, published at once.
    """

    def __init__(self, writer: SectionWriter, report: VersionReport) -> None:
        self._writer = writer
        self._report = report
        self._figures: Callable[[], dict[str, Any]] = dict
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="report", daemon=True)
        self._publish()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def follow(self, figures: Callable[[], dict[str, Any]]) -> None:
        """Take fields of the report from `figures` from now on; it is called often and has to be cheap."""
        self._figures = figures

    def update(self, **fields: Any) -> None:
        """Change fields of the report and publish it now."""
        with self._lock:
            self._report = self._report.model_copy(update=fields)
            self._publish()

    def progress(self, share: float) -> None:
        """Tell the share that is loaded; steps under a percent are not published, since weights come in thousands."""
        if share - self._report.progress >= PROGRESS_STEP or share >= 1.0:
            self.update(progress=share)

    def stop(self) -> None:
        """Publish once more and end the thread."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(2.0)
        self.update(**self._figures())

    def _run(self) -> None:
        looks = 0
        last: dict[str, Any] = {}
        while not self._stopped.wait(LOOK_SECONDS):
            looks += 1
            try:
                figures = self._figures()
                if figures != last or looks * LOOK_SECONDS >= PUBLISH_SECONDS:
                    self.update(**figures)
                    last, looks = figures, 0
            # A section that cannot be written once must not silence it for good.
            except Exception:
                _log.exception("the report could not be published")

    def _publish(self) -> None:
        self._writer.publish(self._report.model_dump(mode="json"))
