"""One try of one version at one request."""

import os
from dataclasses import dataclass

from piccard_contract.errors import ErrorCode, RequestError
from piccard_contract.policy import Deadlines
from piccard_contract.request import Attempt as AttemptKeys
from piccard_contract.request import GatewayClaims, GenerateRequest

from piccard_canary.availability import LoadedVersion
from piccard_canary.breakers import Probe
from piccard_canary.load import AttemptLoad
from piccard_canary.protocols import Stamp

# Outputs that the router reads, whatever the client asked for. Why a generation ended is in the details of its last
# response; finish_reason itself would cost a tensor in every response.
ROUTER_OUTPUTS = frozenset({"text_output", "token_ids", "status", "details"})

# Milliseconds between the responses of a version whose tokens are only gathered for one answer.
GATHER_MS = 200


@dataclass(slots=True, eq=False)
class Attempt:
    """A call of a version, from its start until the router gives it up or it ends.

    Attributes:
        loaded: the version and its process.
        request: what the version is asked.
        stamp: what its responses are told with.
        started: monotonic seconds.
        first_token, last_token: monotonic seconds of its first and last tokens, or None before the first.
        logprob_base: cumulative_logprob of the tokens that were resumed from, to be added to the version's own.
        introduced: whether the client has seen a response of it.
        tripped: whether the watchdog has found it at fault, so that it is not found twice.
        given_up: whether it was taken from its thread, which may still be blocked on the version.
        ended: whether its thread is through with it.
        load: the load of its version while it runs.
        probe: the permit with which it tries a version whose breaker is half open.
    """

    loaded: LoadedVersion
    request: GenerateRequest
    stamp: Stamp
    started: float
    first_token: float | None = None
    last_token: float | None = None
    logprob_base: float | None = None
    introduced: bool = False
    tripped: bool = False
    given_up: bool = False
    ended: bool = False
    load: AttemptLoad | None = None
    probe: Probe | None = None

    @property
    def version(self) -> int:
        return self.loaded.version

    def token_gap(self, tokens: int) -> float | None:
        """Seconds between two of its `tokens` on average; None for fewer than two."""
        if self.first_token is None or self.last_token is None or tokens < 2:
            return None
        return (self.last_token - self.first_token) / (tokens - 1)

    def fault(self, now: float, process: int | None, deadlines: Deadlines) -> RequestError | None:
        """What is wrong with it at `now`, where `process` is the version's living process."""
        if process != self.loaded.pid:
            return RequestError(ErrorCode.VERSION_DIED, f"version {self.version} died; retry", version=self.version)
        if self.last_token is None:
            limit, since, what = deadlines.first_token, self.started, "its first token"
        else:
            limit, since, what = deadlines.between_tokens, self.last_token, "its next token"
        if now - since <= limit:
            return None
        return RequestError(
            ErrorCode.DEADLINE_EXCEEDED,
            f"version {self.version} did not send {what} within {limit:g} s; retry, or raise the policy's deadlines",
            version=self.version,
        )


def version_request(
    request: GenerateRequest, *, token: str, router: str, claims: GatewayClaims | None, gather: bool
) -> GenerateRequest:
    """What a version is asked: always a stream, so that failures can be met at any token.

    Args:
        token: the attempt's cancel token.
        router: owner of this process's lock.
        claims: tenant and priority that the gateway vouched for.
        gather: whether the tokens are only gathered, so that large responses serve as well.
    """
    known = claims or GatewayClaims()
    extensions = request.extensions.model_copy(
        update={
            "announce": False,
            "gateway": None,
            "attempt": AttemptKeys(
                cancel_token=token,
                tenant=known.tenant,
                priority=known.priority,
                signature=known.signature,
                router=router,
                process=os.getpid(),
            ),
            "coalesce_ms": max(request.extensions.coalesce_ms, GATHER_MS if gather else 0),
        }
    )
    return request.model_copy(
        update={
            "stream": True,
            "repeat_prompt": False,
            "extensions": extensions,
        }
    )
