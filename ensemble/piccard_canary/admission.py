"""Reads, validates and admits a request, once and never on the token path."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from piccard_contract.claims import ClaimsCheck
from piccard_contract.errors import ErrorCode, RequestError
from piccard_contract.policy import Policy
from piccard_contract.request import GenerateRequest, check_tensor_bytes, parse_request

from piccard_canary.counters import Counters
from piccard_canary.token_limits import TokenLimits


class Admission:
    """Turns a client's tensors into the JSON that routers read.

    Args:
        policy: the policy of a request that comes now; it names the headers.
        limits: how many tokens may be asked for.
    """

    def __init__(
        self, policy: Callable[[], Policy], claims: ClaimsCheck, counters: Counters, limits: TokenLimits
    ) -> None:
        self._policy = policy
        self._claims = claims
        self._counters = counters
        self._limits = limits

    def measure(self, sizes: Mapping[str, int]) -> None:
        """Refuse tensors that are too large to be looked into: tensor name -> bytes. Raises RequestError, counted."""
        try:
            check_tensor_bytes(sizes)
        except RequestError as error:
            self._counters.count("piccard_refusals_total", code=error.code.value)
            raise

    def admit(self, inputs: Mapping[str, Sequence[Any]], parameters: Mapping[str, Any], request_id: str) -> str:
        """The admitted request as JSON of `GenerateRequest`.

        Args:
            inputs: tensor name -> its values, flat.
            parameters: of the request, forwarded headers among them.
            request_id: where the client sent none of its own.

        Raises:
            RequestError: what the client has to change, or when there are tokens for it again. It has been counted.
        """
        try:
            request = self._charged(self._read(inputs, parameters, request_id))
            return request.model_dump_json(exclude_defaults=True)
        except RequestError as error:
            self._counters.count("piccard_refusals_total", code=error.code.value)
            raise
        except Exception:
            self._counters.count("piccard_refusals_total", code=ErrorCode.INTERNAL.value)
            raise

    def _read(
        self, inputs: Mapping[str, Sequence[Any]], parameters: Mapping[str, Any], request_id: str
    ) -> GenerateRequest:
        policy = self._policy()
        request = parse_request(
            inputs,
            parameters,
            request_id=request_id,
            canary_header=policy.header,
            sticky_keys=policy.sticky_keys,
        )
        if request.extensions.attempt is not None:
            raise RequestError(ErrorCode.INVALID_VALUE, "extensions.attempt is set by the router; leave it out")
        claims = request.extensions.gateway
        if claims is None or self._claims.believed(claims) is not None:
            return request
        self._counters.count("piccard_unsigned_claims_total")
        return request.model_copy(update={"extensions": request.extensions.model_copy(update={"gateway": None})})

    def _charged(self, request: GenerateRequest) -> GenerateRequest:
        """The request with what was taken from the buckets for it; claims that it still has are believed."""
        if request.extensions.cancel is not None:
            return request
        claims = request.extensions.gateway
        charge = self._limits.charge("" if claims is None else claims.tenant, request)
        return request if charge is None else request.model_copy(update={"charge": charge})
