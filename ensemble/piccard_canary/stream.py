"""One request on its way: attempts, fallback and resume. A state machine over versions and a client.

Each attempt is pumped by one thread. Whatever is sent to the client is sent under the stream's lock and only for the
current attempt, so an attempt that was given up can never be heard of again.
"""

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from piccard_contract.claims import OWN_TENANT
from piccard_contract.errors import ErrorCode, Fault, RequestError, kind_of
from piccard_contract.lifecycle import now as time_of_day
from piccard_contract.policy import Policy
from piccard_contract.request import GatewayClaims, GenerateRequest
from piccard_contract.response import Choice, Response, Usage
from piccard_contract.routing import RouteReason
from prometheus_client import Gauge, Histogram

from piccard_canary.attempt import ROUTER_OUTPUTS, Attempt, version_request
from piccard_canary.availability import LoadedVersion
from piccard_canary.breakers import Breakers, Probe
from piccard_canary.cancel import CancelDesk, mint_token
from piccard_canary.completions import Completions
from piccard_canary.counters import Counters, version_label
from piccard_canary.decision import RETRY_AFTER, Decision, Fleet, successor
from piccard_canary.delivery import Delivery
from piccard_canary.fallback_budget import FallbackBudget
from piccard_canary.load import AttemptLoad, LoadMeter
from piccard_canary.protocols import Frame, Sender, Stamp, VersionClient
from piccard_canary.request_log import RequestLine
from piccard_canary.resume import Progress, obstacle, resumed_request
from piccard_canary.shadow import Answer, Shadow
from piccard_canary.shadows import Shadows

# Seconds that a version has to end a generation that the client cancelled.
CANCEL_GRACE = 1.0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all streams of a router share.

    Attributes:
        fleet: the versions as they are now, with what the stable link names.
        loaded: what is known of the versions that can serve now.
        write: takes the request's log line.
        log: takes a sentence for the server's log.
        clock: monotonic seconds.
        load: counts what is in flight.
        completions: counts what requests came to.
        breakers: of all versions.
        budget: of what stable and previous take over.
        shadows: mirrors requests to another version.
        announce: calls what tells a client its cancel token, now or after a while.
    """

    name: str
    client: VersionClient
    fleet: Callable[[], Fleet]
    loaded: Callable[[], dict[int, LoadedVersion]]
    cancels: CancelDesk
    counters: Counters
    write: Callable[[RequestLine], None]
    log: Callable[[str], None]
    breakers: Breakers
    budget: FallbackBudget
    shadows: Shadows
    clock: Callable[[], float] = time.monotonic
    load: LoadMeter = field(default_factory=lambda: LoadMeter(time.monotonic))
    completions: Completions = field(default_factory=Completions)
    announce: Callable[[Callable[[], None]], None] = lambda tell: tell()


@dataclass(slots=True)
class _Record:
    """What the log and the metrics want to know at the end."""

    failures: list[dict[str, Any]] = field(default_factory=list)
    truncated: list[int] = field(default_factory=list)
    last: Attempt | None = None
    tried: list[int] = field(default_factory=list)
    first_token: float | None = None
    usage: Usage = field(default_factory=Usage)
    finish_reasons: list[str | None] = field(default_factory=list)
    served: Stamp | None = None


class Stream:
    """One admitted request.

    Args:
        policy: as it was when the request came; later changes do not touch it.
        sender: the client's end, for errors.
        delivery: the client's end, for what versions send.
        received: monotonic seconds of its receipt.
        probe: the permit with which the first version is tried, where its breaker is half open.
        on_token: told of every cancel token that is given out.
        on_end: told once, when the request has been answered.

    Attributes:
        tokens: all cancel tokens that were given out.
    """

    def __init__(
        self,
        request: GenerateRequest,
        policy: Policy,
        decision: Decision,
        *,
        sender: Sender,
        delivery: Delivery,
        around: Surroundings,
        claims: GatewayClaims | None,
        received: float,
        probe: Probe | None = None,
        on_token: Callable[["Stream", str], None],
        on_end: Callable[["Stream"], None],
    ) -> None:
        self.request = request
        self.policy = policy
        self.current: Attempt | None = None
        self.done = False
        self.tokens: list[str] = []
        self._decision = decision
        self._sender = sender
        self._delivery = delivery
        self._around = around
        self._claims = claims
        self._received = received
        self._probe = probe
        self._shadow: Shadow | None = None
        self._mirrors = False
        self._on_token = on_token
        self._on_end = on_end
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._progress = Progress()
        self._cancelled_at: float | None = None
        self._record = _Record()
        self._outputs = ROUTER_OUTPUTS | request.returns
        self._gaps: Histogram | None = None
        self._code = ""

    def serve(self) -> None:
        """Bring the request to its end on the calling thread; returns when it is done or was given to another."""
        with self._lock:
            attempt = self._begin(self._decision.version, self._decision.reason, self.request)
            attempt.probe = self._probe
        self._run(attempt)

    def fault(self, process: Callable[[int], int | None]) -> tuple[Attempt, RequestError] | None:
        """What the watchdog finds wrong, looking without the lock. `process` tells a version's living process."""
        attempt = self.current
        if self.done or attempt is None or attempt.tripped:
            return None
        now = self._around.clock()
        if now - self._received > self.policy.abandoned_limit:
            return attempt, RequestError(
                ErrorCode.DEADLINE_EXCEEDED,
                f"the request ran for {self.policy.abandoned_limit:g} s, the policy's abandoned_limit; ask for less",
                version=attempt.version,
            )
        if self._cancelled_at is not None and now - self._cancelled_at > CANCEL_GRACE:
            return attempt, RequestError(ErrorCode.CANCELLED, "the request was cancelled", version=attempt.version)
        error = attempt.fault(now, process(attempt.version), self.policy.deadlines)
        return None if error is None else (attempt, error)

    def give_up(self, attempt: Attempt, error: RequestError, *, still: Callable[[], bool]) -> None:
        """Take the request from `attempt`, whose thread may be blocked, and bring it to its end on this thread.

        Args:
            still: whether the fault stands now that nothing moves; tokens may have come since it was found.
        """
        with self._lock:
            if self.done or self.current is not attempt:
                return
            if not still():
                attempt.tripped = False
                return
            if not attempt.ended:
                attempt.given_up = True
                self._blocked(attempt).inc()
        following = self._follow(attempt, error)
        # Not before the request is in other hands: the version's answer to it would be taken for the attempt's end.
        if error.code is not ErrorCode.VERSION_DIED:
            self._around.cancels.post(attempt.version, attempt.stamp.cancel_token)
        self._run(following)

    def cancel(self) -> bool:
        """End the request for its client; whether it was still running."""
        with self._lock:
            if self.done:
                return False
            if self._cancelled_at is None:
                self._cancelled_at = self._around.clock()
        # The version may not have met the attempt yet, then it knows no such token.
        while not self.done and self._around.clock() - self._cancelled_at < CANCEL_GRACE:
            attempt = self.current
            if attempt is None or self._around.cancels.ask(attempt.version, attempt.stamp.cancel_token, CANCEL_GRACE):
                break
            time.sleep(0.02)
        # A version may say yes with its last token on the way: what the client was told decides.
        self._ended.wait(CANCEL_GRACE)
        return self._code != "OK"

    def fail(self, error: RequestError) -> None:
        """End the request with an error, whatever its attempt is doing."""
        with self._lock:
            if not self.done:
                self._fail(error)

    def _run(self, attempt: Attempt | None) -> None:
        while attempt is not None:
            error = self._pump(attempt)
            attempt = None if error is None else self._follow(attempt, error)

    def _pump(self, attempt: Attempt) -> RequestError | None:
        """Read an attempt to its end; why it failed, or None where the request ended with it or it was given up."""
        in_flight = self._around.counters.gauge("piccard_in_flight", version=version_label(attempt.version))
        in_flight.inc()
        load = attempt.load = AttemptLoad(self._around.load, attempt.version, attempt.loaded.requests)
        failure: RequestError | None = None
        try:
            if self.request.extensions.announce and self._delivery.passes:
                self._around.announce(lambda: self._announce(attempt))
            frames: Iterator[Frame] = self._around.client.open(attempt.version, attempt.request, self._outputs)
            for frame in frames:
                # What comes after a failure, or after the attempt was given up, is read and forgotten: the
                # iterator of a call must be emptied.
                if failure is None and attempt is self.current:
                    failure = self._take(attempt, frame)
        except RequestError as error:
            failure = failure or error
        except Exception as error:
            self._around.log(f"request {self.request.id}: {error}\n{traceback.format_exc()}")
            failure = failure or RequestError(ErrorCode.INTERNAL, "the router failed; its log has the details")
        finally:
            in_flight.dec()
            load.end()
            with self._lock:
                attempt.ended = True
                if attempt.given_up:
                    self._blocked(attempt).dec()
        if failure is None and attempt is self.current:
            failure = RequestError(ErrorCode.INTERNAL, "the version ended its answer without a finish reason; retry")
        return failure

    def _announce(self, attempt: Attempt) -> None:
        """Tell the client the attempt's cancel token, unless a token of its text has brought it."""
        with self._lock:
            if self.done or self.current is not attempt or attempt.last_token is not None:
                return
            announcement = Response([Choice() for _ in range(self.request.sampling.n)])
            announcement.served_version = attempt.version
            announcement.route_reason = attempt.stamp.reason.value
            announcement.cancel_token = attempt.stamp.cancel_token
            self._delivery.deliver(announcement, final=False)

    def _take(self, attempt: Attempt, frame: Frame) -> RequestError | None:
        with self._lock:
            if self.done or self.current is not attempt:
                return None
            now = self._around.clock()
            if frame.plain and self._passes(attempt):
                tokens = frame.token_ids()
                self._note(attempt, tokens, now)
                if tokens and "cumulative_logprob" in self._outputs:
                    self._progress.logprob = frame.cumulative_logprob()
                attempt.introduced = True
                self._delivery.forward(frame, attempt.stamp)
                self._mirror(attempt)
                return None
            return self._take_response(attempt, frame.read(), now, ends=not frame.plain)

    def _passes(self, attempt: Attempt) -> bool:
        """Whether the attempt's plain responses need no word from the router."""
        introduced = attempt.introduced or not self._record.failures
        return self._delivery.passes and introduced and attempt.logprob_base is None

    def _take_response(self, attempt: Attempt, response: Response, now: float, *, ends: bool) -> RequestError | None:
        error, response.error = response.error, None
        if ends and error is None and not any(choice.finish_reason for choice in response.choices):
            error = RequestError(ErrorCode.INTERNAL, "the version ended its answer without a finish reason; retry")
        final = ends and error is None
        tokens = [token for choice in response.choices for token in choice.token_ids]
        self._note(attempt, tokens, now)
        self._progress.has_prompt_logprobs |= response.prompt_logprobs is not None
        self._add_logprob(attempt, response)
        # A failed response has text only where it has tokens: the next version says the rest anew.
        if tokens or error is None:
            self._introduce(attempt, response, final=final)
            if final:
                self._record.usage = response.usage
                self._record.finish_reasons = [choice.finish_reason for choice in response.choices]
            self._delivery.deliver(response, final=final)
            self._mirror(attempt)
        if final:
            self._end("OK")
        return error

    def _note(self, attempt: Attempt, tokens: list[int], now: float) -> None:
        if not tokens:
            return
        if attempt.last_token is None:
            self._gaps = self._around.counters.histogram(
                "piccard_inter_token_seconds", version=version_label(attempt.version)
            )
            self._first_of(attempt, now)
        elif self._gaps is not None:
            self._gaps.observe((now - attempt.last_token) / len(tokens))
        attempt.last_token = now
        if attempt.probe is not None and now - attempt.started > self.policy.breaker.open_for:
            # It has gone on for so long: others need not wait for its end.
            self._settle(attempt, failed=False)
        self._progress.any_tokens = True
        if self.request.sampling.n == 1:
            self._progress.token_ids.extend(tokens)
        if self._record.first_token is None:
            self._record.first_token = now - self._received
            label = version_label(attempt.version)
            self._around.counters.histogram("piccard_first_token_seconds", version=label).observe(
                self._record.first_token
            )

    def _first_of(self, attempt: Attempt, now: float) -> None:
        attempt.first_token = now
        own = self._claims is not None and self._claims.tenant == OWN_TENANT
        self._mirrors = not own and not self._record.failures
        if attempt.load is not None:
            attempt.load.first_token()

    def _mirror(self, attempt: Attempt) -> None:
        """Once the client has the first token, perhaps have another version answer as well."""
        if self._mirrors:
            self._mirrors = False
            self._shadow = self._around.shadows.offer(self.policy, attempt, self._outputs)

    def _tell_shadow(self, answer: Answer | None) -> None:
        if self._shadow is not None:
            self._shadow.served(answer)
            self._shadow = None

    def _add_logprob(self, attempt: Attempt, response: Response) -> None:
        choice = response.choices[0]
        if choice.cumulative_logprob is None:
            return
        choice.cumulative_logprob += attempt.logprob_base or 0.0
        self._progress.logprob = choice.cumulative_logprob

    def _introduce(self, attempt: Attempt, response: Response, *, final: bool) -> None:
        stamp = attempt.stamp
        response.served_version = stamp.version
        response.route_reason = stamp.reason.value
        response.cancel_token = stamp.cancel_token
        if self._record.failures and (final or not attempt.introduced):
            response.details["route"] = {
                "decision": self._decision.reason.value,
                "attempts": list(self._record.failures),
            }
        attempt.introduced = True

    def _follow(self, attempt: Attempt, error: RequestError) -> Attempt | None:
        """After a failed attempt: the next one, or None where the request ended or is in other hands."""
        with self._lock:
            if self.done or self.current is not attempt:
                return None
            self.current = None
            code = error.code
            label = version_label(attempt.version)
            self._settle(attempt, failed=self._blames(error))
            self._tell_shadow(None)
            self._around.counters.count("piccard_attempt_failures_total", version=label, code=code.value)
            self._record.failures.append({"version": attempt.version, "code": code.value})
            if attempt.last_token is not None:
                self._record.truncated.append(attempt.version)
            try:
                return self._next(attempt, error.at(attempt.version))
            except RequestError as last:
                self._fail(last)
            except Exception as defect:
                self._around.log(f"request {self.request.id}: {defect}\n{traceback.format_exc()}")
                self._fail(RequestError(ErrorCode.INTERNAL, "the router failed; its log has the details"))
            return None

    def _blames(self, error: RequestError) -> bool | None:
        """Whether a failure is the version's own; None where it says nothing of it."""
        expired = self._around.clock() - self._received > self.policy.abandoned_limit
        # One that is full works as fast as it can.
        full = error.code is ErrorCode.OVERLOADED
        if self._cancelled_at is not None or expired or full or kind_of(error.code).fault is Fault.CLIENT:
            return None
        return True

    def _settle(self, attempt: Attempt, *, failed: bool | None) -> None:
        """Tell the breaker how an attempt went."""
        breakers, probe = self._around.breakers, attempt.probe
        attempt.probe = None
        if probe is not None:
            self._probe = None
            breakers.settle(probe, failed=failed)
        elif failed is not None:
            breakers.record(attempt.version, attempt.loaded.pid, self.policy.breaker, failed=failed)

    def _next(self, attempt: Attempt, error: RequestError) -> Attempt:
        """The attempt that takes over from `attempt`.

        Raises:
            RequestError: there is none; what the client is told.
        """
        now = self._around.clock()
        if self._cancelled_at is not None:
            raise RequestError(ErrorCode.CANCELLED, "the request was cancelled", version=attempt.version)
        resumed = attempt.stamp.reason is RouteReason.RESUMED
        if kind_of(error.code).fault is Fault.CLIENT:
            # What the first version took cannot be the client's fault at the second.
            if resumed and error.code is not ErrorCode.CANCELLED:
                raise self._impossible(error, "it refused to go on")
            raise error
        if now - self._received > self.policy.abandoned_limit:
            raise error
        fleet, loaded = self._around.fleet(), self._around.loaded()
        # One that is full works as fast as it can: previous stands in for a stable that fails, and is no second half.
        full = {"version": fleet.stable, "code": ErrorCode.OVERLOADED.value} in self._record.failures
        barred = [*self._record.tried, fleet.previous] if full else self._record.tried
        version = successor(self._decision, barred, fleet)
        if version is None or version not in loaded:
            untried = [v for v in self._decision.fallbacks if v not in barred]
            if self._delivery.told and (untried or len(self._record.failures) > 1):
                raise self._impossible(error, "no other version that may serve it is ready")
            raise _with_retry(error)
        return self._take_over(attempt, error, loaded[version])

    def _take_over(self, attempt: Attempt, error: RequestError, loaded: LoadedVersion) -> Attempt:
        label, code = version_label(attempt.version), error.code.value
        if self._progress.any_tokens:
            hindrance = obstacle(self.request, attempt.loaded, loaded)
            if hindrance is None:
                following = self._begin(
                    loaded.version, RouteReason.RESUMED, resumed_request(self.request, self._progress), loaded
                )
                following.logprob_base = self._progress.logprob
                if self._around.fleet().spares(loaded.version):
                    self._around.budget.note(self.policy.fallback_budget)
                self._around.counters.count("piccard_resumes_total", version=label, code=code)
                return following
            if self._delivery.told:
                raise self._impossible(error, f"version {loaded.version} cannot go on: {hindrance}")
            self._delivery.restart()
            self._progress = Progress()
        self._charge_budget(attempt, loaded)
        following = self._begin(loaded.version, RouteReason.FALLBACK, self.request, loaded)
        self._around.counters.count("piccard_fallbacks_total", version=label, code=code)
        return following

    def _charge_budget(self, attempt: Attempt, loaded: LoadedVersion) -> None:
        """Charge the fallback budget where that binds the version that takes over; raises OVERLOADED."""
        if not self._around.fleet().spares(loaded.version):
            return
        try:
            self._around.budget.take(self.policy.fallback_budget, loaded.load, attempt.version)
        except RequestError:
            self._around.counters.count("piccard_fallback_refusals_total", version=version_label(attempt.version))
            raise

    def _begin(
        self, version: int, reason: RouteReason, request: GenerateRequest, loaded: LoadedVersion | None = None
    ) -> Attempt:
        if loaded is None:
            # Between the decision and now the version may have gone; then the call itself tells.
            loaded = self._around.loaded().get(version) or LoadedVersion(version, pid=0)
        token = mint_token(version)
        stamp = Stamp(version, reason, token)
        asked = version_request(
            request,
            token=token,
            router=self._around.name,
            claims=self._claims,
            gather=not self._delivery.passes,
        )
        attempt = Attempt(loaded, asked, stamp, started=self._around.clock())
        self._record.tried.append(version)
        self._record.served = stamp
        self._record.last = attempt
        self.tokens.append(token)
        self._on_token(self, token)
        self.current = attempt
        return attempt

    def _impossible(self, error: RequestError, why: str) -> RequestError:
        return RequestError(
            ErrorCode.RESUME_IMPOSSIBLE,
            f"the stream failed after its first token ({error.code.value}: {error.message}) and {why}; send it again",
            version=error.version,
            retry_after=error.retry_after,
        )

    def _blocked(self, attempt: Attempt) -> Gauge:
        return self._around.counters.gauge("piccard_blocked_attempts", version=version_label(attempt.version))

    def _fail(self, error: RequestError) -> None:
        try:
            self._sender.fail(error)
        finally:
            self._end(error.code.value)

    def _end(self, code: str) -> None:
        if code == "OK" and self.current is not None:
            self._settle(self.current, failed=False)
        elif self._probe is not None:
            self._around.breakers.settle(self._probe, failed=None)
            self._probe = None
        self.done = True
        self.current = None
        self._code = code
        self._ended.set()
        self._on_end(self)
        seconds = self._around.clock() - self._received
        served = self._record.served
        counters, label = self._around.counters, version_label(served.version if served else None)
        reason = served.reason if served else self._decision.reason
        counters.count("piccard_requests_total", version=label, reason=reason.value)
        counters.histogram("piccard_request_seconds", version=label).observe(seconds)
        if code == ErrorCode.CANCELLED:
            counters.count("piccard_cancels_total", version=label)
        elif code != "OK":
            counters.count("piccard_errors_total", version=label, code=code)
        self._around.completions.add(
            self._claims.tenant if self._claims else "", self.request.charge, self._tokens_used(code)
        )
        self._around.write(self._line(code, seconds))
        self._tell_shadow(self._answer(seconds) if code == "OK" and not self._record.failures else None)

    def _answer(self, seconds: float) -> Answer:
        """What the client was answered, by one version alone."""
        last, tokens = self._record.last, self._progress.token_ids
        assert last is not None, "something answered"
        load = last.load
        return Answer(
            last.version,
            tokens,
            self._record.first_token,
            last.token_gap(len(tokens)),
            load.waiting() if load is not None else None,
            load.sending() if load is not None else None,
            load.others if load is not None else 0,
            self._record.usage,
            seconds,
        )

    def _tokens_used(self, code: str) -> int:
        """Tokens that the request came to: those that a version counted, or as much as is known without it."""
        usage, charge, told = self._record.usage, self.request.charge, self._progress.token_ids
        if charge is None or usage.prompt_tokens:
            return usage.prompt_tokens + usage.completion_tokens
        if code == "OK" or (self._progress.any_tokens and self.request.sampling.n > 1):
            return charge.tokens
        # A prompt that nobody answered costs its sender nothing, unless it was he who left.
        return charge.prompt + len(told) if told or code == ErrorCode.CANCELLED else 0

    def _line(self, code: str, seconds: float) -> RequestLine:
        record = self._record
        usage = record.usage
        tokens = usage.completion_tokens or len(self._progress.token_ids)
        last = record.last
        load = last.load if last is not None else None
        return RequestLine(
            at=time_of_day(),
            id=self.request.id,
            router=self._around.name,
            stream=self.request.stream,
            version=record.served.version if record.served else None,
            reason=record.served.reason.value if record.served else None,
            decision=self._decision.reason.value,
            code=code,
            finish_reasons=record.finish_reasons,
            attempts=record.failures,
            first_token_s=record.first_token,
            seconds=seconds,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=tokens,
            cached_tokens=usage.cached_tokens,
            tenant=self._claims.tenant if self._claims else "",
            truncated=record.truncated,
            token_gap_s=last.token_gap(tokens) if last is not None else None,
            first_load=load.waiting() if load is not None else None,
            gap_load=load.sending() if load is not None else None,
            others=load.others if load is not None else 0,
            passed_over=self._decision.passed_over,
        )


def _with_retry(error: RequestError) -> RequestError:
    """A server's fault with a time after which another try may succeed."""
    if error.retry_after is not None or kind_of(error.code).triton != "UNAVAILABLE":
        return error
    return RequestError(error.code, error.message, retry_after=RETRY_AFTER, version=error.version)
