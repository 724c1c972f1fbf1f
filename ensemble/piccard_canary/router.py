"""Takes admitted requests, one a thread, and brings each to its end."""

import secrets
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from piccard_contract.claims import ClaimsCheck
from piccard_contract.errors import ErrorCode, RequestError
from piccard_contract.lifecycle import now as time_of_day
from piccard_contract.policy import Policy
from piccard_contract.request import GenerateRequest
from piccard_contract.response import Choice, Response
from piccard_contract.routing import RouteKeys, RouteReason
from pydantic import ValidationError

from piccard_canary.breaker import BreakerState
from piccard_canary.breakers import Probe
from piccard_canary.cancel import token_version
from piccard_canary.counters import NO_VERSION, version_label
from piccard_canary.decision import Decision, decide
from piccard_canary.delivery import Delivery, Streamed, Whole
from piccard_canary.protocols import Sender
from piccard_canary.request_log import RequestLine
from piccard_canary.stream import Stream, Surroundings

# Requests in flight at most, one thread each; threads that hang on dead versions count too.
MAX_STREAMS = 2048

# Seconds that a cancel for another process's stream may take.
CANCEL_TIMEOUT = 2.0


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """How a router answers.

    Attributes:
        streams: whether a request may be answered by several responses.
    """

    streams: bool
    max_streams: int = MAX_STREAMS


class Router:
    """The streams of one process.

    Args:
        policy: the policy of a request that starts now.
        wake: called when a stream begins.
    """

    def __init__(
        self,
        around: Surroundings,
        *,
        policy: Callable[[], Policy],
        claims: ClaimsCheck,
        settings: RouterSettings,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._around = around
        self._policy = policy
        self._claims = claims
        self._settings = settings
        self._wake = wake
        self._lock = threading.Lock()
        self._streams: set[Stream] = set()
        self._by_token: dict[str, Stream] = {}
        self._random = Random(secrets.randbits(128))

    def streams(self) -> list[Stream]:
        """Those in flight."""
        with self._lock:
            return list(self._streams)

    def in_flight(self) -> dict[int, int]:
        """Requests in flight by version."""
        counts: dict[int, int] = {}
        for stream in self.streams():
            attempt = stream.current
            if attempt is not None:
                counts[attempt.version] = counts.get(attempt.version, 0) + 1
        return counts

    def answer(self, admitted: str | bytes, sender: Sender) -> None:
        """Answer one request on the calling thread, or leave it to the thread that took it over.

        Whatever happens, the request is ended: one that never is hangs its client for ever.
        """
        received = self._around.clock()
        stream: Stream | None = None
        try:
            request = _read(admitted)
            sender.returns = request.returns
            if request.extensions.cancel is not None:
                self._cancel(request.extensions.cancel, sender)
                return
            stream = self._admit(request, sender, received)
            self._wake()
            stream.serve()
        except BaseException as error:
            self._end(error, sender, stream)

    def _admit(self, request: GenerateRequest, sender: Sender, received: float) -> Stream:
        policy = self._policy()
        self._around.budget.request(policy.fallback_budget)
        decision: Decision | None = None
        probe: Probe | None = None
        try:
            self._check(request)
            decision, probe = self._decide(policy, request.route)
            self._take_over(policy, decision)
        except RequestError as error:
            if probe is not None:
                self._around.breakers.settle(probe, failed=None)
            self._refused(request, error, received, decision)
            raise
        stream = Stream(
            _seeded(request),
            policy,
            decision,
            probe=probe,
            sender=sender,
            delivery=self._delivery(request, sender),
            around=self._around,
            claims=self._claims.believed(request.extensions.gateway),
            received=received,
            on_token=self._remember,
            on_end=self._forget,
        )
        with self._lock:
            self._streams.add(stream)
        return stream

    def _decide(self, policy: Policy, keys: RouteKeys) -> tuple[Decision, Probe | None]:
        """Where a request goes, and the permit to try that version where its breaker is half open."""
        fleet, loaded = self._around.fleet(), self._around.loaded()
        states = self._around.breakers.states(loaded, policy.breaker)
        resting = {version for version, state in states.items() if state is BreakerState.OPEN}
        chance = self._random.random()
        while True:
            decision = decide(policy, keys, replace(fleet, resting=resting), lambda: chance)
            version = decision.version
            half_open = states.get(version) is BreakerState.HALF_OPEN and version not in resting
            if not half_open or decision.reason is RouteReason.PIN:
                return decision, None
            probe = self._around.breakers.probe(version, loaded[version].pid, policy.breaker)
            if probe is not None:
                return decision, probe
            resting.add(version)

    def _take_over(self, policy: Policy, decision: Decision) -> None:
        """Charge the fallback budget where a version is to serve what was meant for another; raises OVERLOADED."""
        if decision.passed_over is None or not self._around.fleet().spares(decision.version):
            return
        taker = self._around.loaded().get(decision.version)
        try:
            self._around.budget.take(policy.fallback_budget, taker.load if taker else 0.0, decision.passed_over)
        except RequestError:
            label = version_label(decision.passed_over)
            self._around.counters.count("piccard_fallback_refusals_total", version=label)
            raise

    def _check(self, request: GenerateRequest) -> None:
        if request.stream and not self._settings.streams:
            raise RequestError(
                ErrorCode.INVALID_VALUE,
                "stream = true: this model answers once; leave it out, or call the model that streams",
            )
        if len(self._streams) >= self._settings.max_streams:
            raise RequestError(
                ErrorCode.OVERLOADED,
                f"{len(self._streams)} requests are in flight, which is the limit",
                retry_after=1.0,
            )

    def _delivery(self, request: GenerateRequest, sender: Sender) -> Delivery:
        if request.stream:
            return Streamed(sender)
        return Whole(sender, request.text or "" if request.repeat_prompt else "")

    def _remember(self, stream: Stream, token: str) -> None:
        with self._lock:
            self._by_token[token] = stream

    def _forget(self, stream: Stream) -> None:
        with self._lock:
            self._streams.discard(stream)
            for token in stream.tokens:
                self._by_token.pop(token, None)

    def _cancel(self, token: str, sender: Sender) -> None:
        with self._lock:
            stream = self._by_token.get(token)
        version = token_version(token)
        if stream is not None:
            cancelled = stream.cancel()
        elif version is not None and version in self._around.loaded():
            # A stream of the other router, or of a client that called the version itself.
            cancelled = self._around.cancels.ask(version, token, CANCEL_TIMEOUT)
        else:
            cancelled = False
            if version is not None:
                # One that the server unloads is called no more, and may run it yet.
                self._around.cancels.announce(token)
        sender.send(Response([Choice()], details={"cancelled": cancelled}), final=True)

    def _refused(
        self, request: GenerateRequest, error: RequestError, received: float, decision: Decision | None
    ) -> None:
        # A pin that was refused is a number of the client's choice and no label.
        self._around.counters.count("piccard_errors_total", version=NO_VERSION, code=error.code.value)
        claims = self._claims.believed(request.extensions.gateway)
        self._around.completions.add(claims.tenant if claims else "", request.charge, 0)
        self._around.write(
            RequestLine(
                at=time_of_day(),
                id=request.id,
                router=self._around.name,
                stream=request.stream,
                version=None,
                reason=None,
                decision=None if decision is None else decision.reason.value,
                passed_over=None if decision is None else decision.passed_over,
                code=error.code.value,
                seconds=self._around.clock() - received,
            )
        )

    def _end(self, error: BaseException, sender: Sender, stream: Stream | None) -> None:
        if isinstance(error, RequestError):
            told = error
        else:
            self._around.log(f"{error!r}\n{traceback.format_exc()}")
            told = RequestError(ErrorCode.INTERNAL, "the router failed; its log has the details")
        try:
            if stream is not None:
                stream.fail(told)
            elif not sender.ended:
                sender.fail(told)
        except Exception as defect:
            self._around.log(f"a request could not be ended: {defect!r}")


def _read(admitted: str | bytes) -> GenerateRequest:
    try:
        return GenerateRequest.model_validate_json(admitted)
    except ValidationError as error:
        raise RequestError(
            ErrorCode.INVALID_JSON, "admitted is not what admission writes; call the service's own model instead"
        ) from error


def _seeded(request: GenerateRequest) -> GenerateRequest:
    """The request with a seed where it has none, so that another version goes on with the same random numbers."""
    if request.sampling.greedy or request.sampling.fixed_seed is not None:
        return request
    sampling = request.sampling.model_copy(update={"seed": secrets.randbits(62)})
    return request.model_copy(update={"sampling": sampling})
