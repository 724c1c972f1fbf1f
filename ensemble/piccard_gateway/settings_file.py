"""gateway.yaml as it is now: read again when it changes, the last good one kept when an edit is broken."""

import logging
from pathlib import Path

from piccard_contract.file_watch import FileWatch
from piccard_contract.gateway_file import GatewayFile, GatewayFileError, read_gateway_file

_log = logging.getLogger(__name__)


class SettingsFile:
    """The settings at `path`; a look costs one stat."""

    def __init__(self, path: Path) -> None:
        self._settings = GatewayFile()
        self._watch = FileWatch(path)

    def current(self) -> GatewayFile:
        """The settings of a request that starts now."""
        if self._watch.changed():
            try:
                self._settings = read_gateway_file(self._watch.path)
            except (GatewayFileError, OSError) as error:
                _log.warning("%s; the last good settings stay in use", error)
        return self._settings
