"""Whose a request is: tenant and priority, where the gateway vouched for them."""

import threading

from piccard_contract.claims import ClaimsCheck
from piccard_contract.request import GatewayClaims, GenerateRequest


class Tenants:
    """Takes from requests the tenant and priority that nobody vouched for.

    Routers have looked already, but a client can call a version itself and send what only a router may.

    Args:
        check: knows the gateway's secret; without it every claim is believed.

    Attributes:
        ignored: requests whose claims were taken away.
    """

    def __init__(self, check: ClaimsCheck | None) -> None:
        self._check = check
        self._lock = threading.Lock()
        self.ignored = 0

    def settle(self, request: GenerateRequest) -> GenerateRequest:
        """The request with claims that are believed, or with none."""
        extensions = request.extensions
        claims = extensions.attempt.claims if extensions.attempt else extensions.gateway
        if claims is None or self._check is None or self._check.believed(claims) is not None:
            return request
        with self._lock:
            self.ignored += 1
        attempt = extensions.attempt
        if attempt is not None:
            nobody = GatewayClaims()
            attempt = attempt.model_copy(update={"tenant": nobody.tenant, "priority": nobody.priority})
        return request.model_copy(
            update={"extensions": extensions.model_copy(update={"attempt": attempt, "gateway": None})}
        )
