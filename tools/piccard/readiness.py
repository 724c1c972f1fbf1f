"""Whether a service generates: what /readyz answers."""

import time

from piccard_contract.home import Service
from piccard_contract.policy import Policy

from piccard.errors import OperationError
from piccard.health_server import Health
from piccard.policy_store import load_policy
from piccard.probe import generate_once


class Readiness:
    """Asks services for one token of their stable version.

    Args:
        address: host:port of the server's gRPC.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._headers: dict[str, str] = {}

    def of(self, service: Service, timeout: float) -> Health:
        """Whether the service's public model gives a token of stable within `timeout` seconds."""
        parameters = {self._header(service): "false"}
        started = time.monotonic()
        try:
            answer = generate_once(self._address, service.ensemble, "Hello", 1, timeout, parameters=parameters)
        except OperationError as error:
            return False, {"ready": False, "reason": str(error)}
        return True, {"ready": True, "version": answer.served_version, "seconds": time.monotonic() - started}

    def _header(self, service: Service) -> str:
        """The header that keeps a request from the canary; of a broken policy.yaml the last good one, as routers do."""
        try:
            self._headers[service.name] = load_policy(service).header.lower()
        except OperationError:
            self._headers.setdefault(service.name, Policy().header.lower())
        return self._headers[service.name]
