"""Keeps the file that tells what serves a version's operators."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from piccard_contract.operators import OperatorsReport, write_operators

_log = logging.getLogger(__name__)

REFRESH_SECONDS = 10.0


class OperatorsFile:
    """Writes the file when its tables have something new, and every `REFRESH_SECONDS` for what is counted.

    Args:
        path: the file.
        report: its content.
        revision: another number when the tables of `report` have something new.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        path: Path,
        report: Callable[[], OperatorsReport],
        revision: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._report = report
        self._revision = revision
        self._clock = clock
        self._written: tuple[int, float] | None = None
        self._last: OperatorsReport | None = None
        self._failed = False

    def refresh(self) -> None:
        """Bring the file up to date; cheap where it is. A disk that is full is logged once and harms nothing."""
        revision, now = self._revision(), self._clock()
        if self._written is not None and self._written[0] == revision and now - self._written[1] < REFRESH_SECONDS:
            return
        self._written = revision, now
        report = self._report()
        if report == self._last:
            return
        try:
            write_operators(self._path, report)
            self._last, self._failed = report, False
        except OSError as error:
            if not self._failed:
                _log.warning("what serves the operators could not be written to %s: %s", self._path, error)
            self._failed = True

    def remove(self) -> None:
        """Remove the file, as its process ends."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("%s could not be removed: %s", self._path, error)
