"""One request that a second version answers too, for nobody but the comparison."""

import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from piccard_contract.errors import ErrorCode, RequestError
from piccard_contract.request import GenerateRequest
from piccard_contract.response import Usage

from piccard_canary.attempt import Attempt
from piccard_canary.availability import LoadedVersion
from piccard_canary.cancel import mint_token
from piccard_canary.load import AttemptLoad, LoadMeter
from piccard_canary.protocols import Frame, VersionClient


class Outcome(StrEnum):
    """How a mirrored request ended: with a pair of answers, by a failure of its version, or cancelled by us."""

    PAIR = "pair"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a version answered.

    Attributes:
        version: its number.
        token_ids: all that it gave to this request.
        first_token, token_gap: seconds to the first token, and between two on average; None where unknown.
        first_load, gap_load: requests of the version in flight on average until the first token, and after it.
        others: requests of other versions in flight when it began.
        usage: as the version counted.
        seconds: until the end.
    """

    version: int
    token_ids: Sequence[int] = ()
    first_token: float | None = None
    token_gap: float | None = None
    first_load: float | None = None
    gap_load: float | None = None
    others: int = 0
    usage: Usage = field(default_factory=Usage)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a mirrored request.

    Attributes:
        code: OK, or why its version failed.
        shadow: what its version answered, as far as it came.
        served: what the client was answered; only in a pair.
        comparable: whether both versions count tokens alike, by one tokenizer and chat template.
    """

    outcome: Outcome
    code: str
    shadow: Answer
    served: Answer | None
    comparable: bool


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Position of the first token that differs, or of the end of the shorter one; None where both are the same."""
    for position, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return position
    return None if len(one) == len(other) else min(len(one), len(other))


class Shadow:
    """A request on its way through a version whose answer nobody hears.

    It is pumped by a thread of its own; `served` tells it how the client's own request ended.

    Args:
        primary: the attempt that the client hears.
        loaded: the version that answers too.
        outputs: names of the outputs that the client's request asks for: the answers shall cost the same.
        on_end: told once, when nothing more is to come of it.
    """

    def __init__(
        self,
        primary: Attempt,
        loaded: LoadedVersion,
        outputs: frozenset[str],
        *,
        now: float,
        clock: Callable[[], float],
        log: Callable[[str], None],
        on_end: Callable[["Shadow", Ending], None],
    ) -> None:
        stamp = replace(primary.stamp, version=loaded.version, cancel_token=mint_token(loaded.version))
        self.attempt = Attempt(loaded, primary.request, stamp, started=now)
        self.over = False
        self._outputs = outputs
        self._clock = clock
        self._log = log
        self._on_end = on_end
        self._lock = threading.Lock()
        first, second = primary.loaded, loaded
        self._comparable = (
            bool(first.tokenizer_hash)
            and first.tokenizer_hash == second.tokenizer_hash
            and first.template_hash == second.template_hash
        )
        self._tokens: list[int] = []
        self._usage = Usage()
        self._answer: Answer | None = None
        self._served: Answer | None = None

    @property
    def id(self) -> str:
        return self.attempt.request.id

    @property
    def version(self) -> int:
        return self.attempt.version

    def run(self, client: VersionClient, meter: LoadMeter) -> None:
        """Read the answer to its end on the calling thread."""
        attempt = self.attempt
        failure: RequestError | None = None
        finished = False
        load = attempt.load = AttemptLoad(meter, attempt.version, attempt.loaded.requests)
        try:
            attempt.request = _asked(attempt.request, attempt.stamp.cancel_token)
            for frame in client.open(attempt.version, attempt.request, self._outputs):
                # The iterator of a call must be emptied, whatever became of the request.
                if failure is None and not self.over:
                    failure, finished = self._take(frame)
        except RequestError as error:
            failure = failure or error
        except Exception as error:
            self._log(f"shadow of request {self.id}: {error}\n{traceback.format_exc()}")
            failure = failure or RequestError(ErrorCode.INTERNAL, "the router failed; its log has the details")
        finally:
            load.end()
            attempt.ended = True
        if failure is None and not finished:
            failure = RequestError(ErrorCode.INTERNAL, "the version ended its answer without a finish reason; retry")
        if failure is not None:
            self.end(Outcome.FAILED, failure.code.value)
            return
        with self._lock:
            self._answer = self._answered()
        self._pair()

    def served(self, answer: Answer | None) -> None:
        """The client's request is over: with this answer, or None where no version brought it to its end alone."""
        if answer is None:
            self.end(Outcome.CANCELLED, ErrorCode.CANCELLED.value)
            return
        with self._lock:
            self._served = answer
        self._pair()

    def end(self, outcome: Outcome, code: str) -> bool:
        """Be over without a pair; whether it was not yet."""
        with self._lock:
            if self.over:
                return False
            self.over = True
        self._on_end(self, Ending(outcome, code, self._answer or self._answered(), None, self._comparable))
        return True

    def _pair(self) -> None:
        with self._lock:
            if self.over or self._answer is None or self._served is None:
                return
            self.over = True
        self._on_end(self, Ending(Outcome.PAIR, "OK", self._answer, self._served, self._comparable))

    def _take(self, frame: Frame) -> tuple[RequestError | None, bool]:
        """Why the version failed, and whether it has finished."""
        if frame.plain:
            self._note(frame.token_ids())
            return None, False
        response = frame.read()
        self._note([token for choice in response.choices for token in choice.token_ids])
        self._usage = response.usage
        return response.error, any(choice.finish_reason for choice in response.choices)

    def _note(self, tokens: list[int]) -> None:
        if not tokens:
            return
        attempt = self.attempt
        now = self._clock()
        if attempt.first_token is None:
            attempt.first_token = now
            if attempt.load is not None:
                attempt.load.first_token()
        attempt.last_token = now
        self._tokens.extend(tokens)

    def _answered(self) -> Answer:
        attempt = self.attempt
        load = attempt.load
        return Answer(
            attempt.version,
            self._tokens,
            None if attempt.first_token is None else attempt.first_token - attempt.started,
            attempt.token_gap(len(self._tokens)),
            load.waiting() if load is not None else None,
            load.sending() if load is not None else None,
            load.others if load is not None else 0,
            self._usage,
            self._clock() - attempt.started,
        )


def _asked(request: GenerateRequest, token: str) -> GenerateRequest:
    """What the client's version was asked, with another cancel token."""
    told = request.extensions.attempt
    assert told is not None, "a version is never asked without an attempt"
    attempt = told.model_copy(update={"cancel_token": token, "slot": None})
    extensions = request.extensions.model_copy(update={"attempt": attempt})
    return request.model_copy(update={"extensions": extensions, "charge": None})
