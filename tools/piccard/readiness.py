"""Whether a service generates: what /readyz answers."""

import time

from piccard_contract.errors import ErrorCode, RequestError, parse_error
from piccard_contract.home import Service
from piccard_contract.policy import Policy

from piccard.errors import OperationError
from piccard.health_server import Health
from piccard.keys import own_claims
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
        """Whether the service's public model gives a token of stable within `timeout` seconds.

        A version that is full and says so in that time is ready too, and `reason` tells what it said: it serves, and
        whoever sent its requests elsewhere would make the others as full.
        """
        parameters = {self._header(service): "false"}
        started = time.monotonic()
        try:
            answer = generate_once(
                self._address, service.ensemble, "Hello", 1, timeout, parameters=parameters, claims=own_claims(service)
            )
        except OperationError as error:
            full = _full(str(error))
            if full is None:
                return False, {"ready": False, "reason": str(error)}
            seconds = time.monotonic() - started
            return True, {"ready": True, "version": full.version, "seconds": seconds, "reason": full.head()}
        return True, {"ready": True, "version": answer.served_version, "seconds": time.monotonic() - started}

    def _header(self, service: Service) -> str:
        """The header that keeps a request from the canary; of a broken policy.yaml the last good one, as routers do."""
        try:
            self._headers[service.name] = load_policy(service).header.lower()
        except OperationError:
            self._headers.setdefault(service.name, Policy().header.lower())
        return self._headers[service.name]


def _full(text: str) -> RequestError | None:
    """The refusal of a version whose queue or cache is full; None of any other failure, a full router's too."""
    error = parse_error(text)
    return error if error is not None and error.code is ErrorCode.OVERLOADED and error.version is not None else None
