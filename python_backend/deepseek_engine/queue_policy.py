"""Who goes first in the queue, how long it may get, and how long a request may wait in it."""

from piccard_contract.errors import ErrorCode, RequestError

from deepseek_engine.request import EngineError

PRIORITY_SECONDS = 1.0
"""Seconds of waiting that one step of priority is worth."""
TOKENS_PER_SECOND = 1000.0
"""What a request expects to be computed, at this rate, is counted as waited less."""
MOST_EXPECTED = 4096
"""Weighted tokens of a request that count at most: nobody waits long behind others for asking much."""
MOST_DOUBLINGS = 2
"""Steps of priority that weigh a request's tokens at most: by a quarter to four."""

_SMOOTHING = 0.2
_LEAST_RETRY = 1.0
_MOST_RETRY = 60.0


def service_weight(priority: int) -> float:
    """What each expected token of a request counts: a step of priority halves it, one the other way doubles it."""
    return 2.0 ** max(-MOST_DOUBLINGS, min(MOST_DOUBLINGS, priority))


def queue_rank(arrived: float, priority: int, expected: int) -> float:
    """Seconds; lower goes first. It never changes, so whoever waits long enough is before all that come: none starves.

    arrived + PRIORITY_SECONDS * priority + min(service_weight * expected, MOST_EXPECTED) / TOKENS_PER_SECOND

    Args:
        arrived: seconds, monotonic.
        priority: lower goes first.
        expected: tokens that are left to compute, prompt and output.
    """
    size = min(service_weight(priority) * expected, MOST_EXPECTED)
    return arrived + PRIORITY_SECONDS * priority + size / TOKENS_PER_SECOND


class QueuePolicy:
    """Refuses requests that would wait too long, and those that have.

    Args:
        most: sequences that may wait.
        seconds: how long one may wait for its first step.
    """

    def __init__(self, most: int, seconds: float) -> None:
        self._most = most
        self._seconds = seconds
        self._waited = 0.0

    @property
    def retry_after(self) -> float:
        """Seconds after which a refused request may try again: about what the last ones that began have waited."""
        return round(min(max(self._waited, _LEAST_RETRY), _MOST_RETRY), 1)

    def began(self, waited: float) -> None:
        """Learn from a sequence whose first step came after `waited` seconds."""
        self._waited += _SMOOTHING * (waited - self._waited)

    def check(self, waiting: int, coming: int) -> None:
        """Raises RequestError OVERLOADED where `coming` sequences more would be too many."""
        if waiting + coming > self._most:
            raise RequestError(
                ErrorCode.OVERLOADED,
                f"{waiting} sequences wait already, of {self._most} that may; send the request again later",
                retry_after=self.retry_after,
            )

    def is_overdue(self, waited: float) -> bool:
        """Whether a sequence that has waited so long for its first step is to be given up."""
        return waited > self._seconds

    def overdue(self) -> EngineError:
        """What a request is told that has waited too long."""
        return EngineError(
            ErrorCode.OVERLOADED,
            f"the request waited {self._seconds:g} s for its first step; send it again later",
            self.retry_after,
        )
