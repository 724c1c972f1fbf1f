"""Tenant and priority: believed only where the gateway of this start signed them.

Admission, the routers and the versions each look for themselves, since a client can call any of them.
"""

import threading
from pathlib import Path

from piccard_contract.file_watch import FileWatch
from piccard_contract.request import GatewayClaims

# The service's own requests, such as those behind /readyz and of a probe, come in this name. No key has it.
OWN_TENANT = "@piccard"


class ClaimsCheck:
    """Knows the gateway's secret, a file that each start of the gateway writes anew.

    Args:
        secret_file: its path; without the file no claim is believed.
    """

    def __init__(self, secret_file: Path) -> None:
        self._watch = FileWatch(secret_file)
        self._secret = b""
        self._lock = threading.Lock()

    def believed(self, claims: GatewayClaims | None) -> GatewayClaims | None:
        """The claims where their signature is right, else None."""
        if claims is None:
            return None
        with self._lock:
            if self._watch.changed():
                self._secret = self._read()
            secret = self._secret
        return claims if secret and claims.signed_by(secret) else None

    def _read(self) -> bytes:
        try:
            return self._watch.path.read_bytes().strip()
        except OSError:
            return b""
