"""How long a first token is waited for: it follows what first tokens took of late.

deadline = base x length factor x percentile x hour's factor, held between a floor and what the policy allows. Recent
times are kept as if their prompts had no length, so that long prompts do not make short ones wait longer, nor the
other way round.
"""

import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from piccard_contract.errors import ErrorCode, RequestError
from piccard_contract.gateway_file import AdaptiveDeadlines
from piccard_contract.response import Response

from piccard_gateway.generator import Generation, Generator

# Times that are kept, and how many there have to be before they count.
KEPT = 256
ENOUGH = 32


class FirstTokenDeadlines:
    """Recent times to the first token, and the deadlines that follow from them.

    Args:
        settings: those of now.
        hour: of the day, 0 to 23, in UTC.
    """

    def __init__(
        self, settings: Callable[[], AdaptiveDeadlines], hour: Callable[[], int] = lambda: time.gmtime().tm_hour
    ) -> None:
        self._settings = settings
        self._hour = hour
        self._recent: deque[float] = deque(maxlen=KEPT)

    def seconds(self, size: int, most: float) -> float:
        """Seconds for a prompt of `size` bytes, never more than `most`."""
        settings = self._settings()
        if not settings.enabled or len(self._recent) < ENOUGH:
            return most
        rank = min(len(self._recent) - 1, int(settings.percentile * len(self._recent)))
        usual = sorted(self._recent)[rank]
        daily = settings.daily[self._hour()] if settings.daily else 1.0
        return min(most, max(settings.floor, settings.base * _length(settings, size) * usual * daily))

    def took(self, size: int, seconds: float) -> None:
        """A first token of a prompt of `size` bytes came after `seconds`, or had not come by then."""
        self._recent.append(seconds / _length(self._settings(), size))


class TimedGenerator:
    """A generator whose first tokens are timed."""

    def __init__(
        self, inner: Generator, deadlines: FirstTokenDeadlines, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._inner = inner
        self._deadlines = deadlines
        self._clock = clock

    async def generate(self, asked: Generation) -> AsyncGenerator[Response, None]:
        """See `Generator.generate`."""
        begun = self._clock()
        waiting = True
        try:
            async with aclosing(self._inner.generate(asked)) as responses:
                async for response in responses:
                    if waiting and (response.has_text or response.finished):
                        waiting = False
                        self._deadlines.took(asked.size, self._clock() - begun)
                    yield response
        except RequestError as error:
            # What was too late counts as late, else a service that slows down would be refused for ever.
            if waiting and error.code is ErrorCode.DEADLINE_EXCEEDED:
                self._deadlines.took(asked.size, self._clock() - begun)
            raise

    async def live(self) -> bool:
        return await self._inner.live()


def _length(settings: AdaptiveDeadlines, size: int) -> float:
    return 1.0 + size / settings.length_bytes
