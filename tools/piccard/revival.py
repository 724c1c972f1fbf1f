"""When a process that died is started again: at once, then after growing pauses, and at last not any more."""

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0

# A process that lived for this many seconds was well: what went before no longer counts.
GOOD_LIFE = 300.0

# Starts in a row that were no use, after which somebody has to look.
GIVE_UP_AFTER = 8


class Revival:
    """The deaths and starts of one process.

    Whoever watches the process tells what it sees; times are monotonic seconds, and never go back.

    Args:
        limit: starts in a row that were no use, after which it is given up.

    Attributes:
        tries: starts in a row, since it was last well.
        given_up: why nobody starts it any more; empty while somebody does. A process that lives again in spite of
            that was started by a person, and its count begins anew.
    """

    def __init__(self, limit: int = GIVE_UP_AFTER) -> None:
        self._limit = limit
        self.tries = 0
        self.given_up = ""
        self._alive_since: float | None = None
        self._not_before = 0.0

    def alive(self, now: float) -> None:
        """The process lives."""
        if self.given_up:
            self.tries, self.given_up = 0, ""
        if self._alive_since is None:
            self._alive_since = now
        if now - self._alive_since >= GOOD_LIFE:
            self.tries = 0

    def dead(self, now: float) -> None:
        """The process does not live, and nobody is starting it."""
        if self._alive_since is None:
            return
        if now - self._alive_since >= GOOD_LIFE:
            self.tries = 0
        self._alive_since = None
        self._wait(now, f"it died again within {GOOD_LIFE:g} s of each of {self.tries} starts")

    def due(self, now: float) -> bool:
        """Whether a dead process is to be started now."""
        return self._alive_since is None and not self.given_up and now >= self._not_before

    def seconds_left(self, now: float) -> float | None:
        """Until it is started; None where it lives or was given up."""
        if self._alive_since is not None or self.given_up:
            return None
        return max(0.0, self._not_before - now)

    def begin(self) -> None:
        """It is being started."""
        self.tries += 1

    def put_off(self, now: float) -> None:
        """It was not started, for want of something else; the try does not count."""
        self.tries -= 1
        self._not_before = now + FIRST_PAUSE

    def started(self, now: float) -> None:
        """It was started, and may have died since."""
        self._alive_since = now

    def failed(self, now: float, reason: str) -> None:
        """It could not be started."""
        self._wait(now, f"it could not be started {self.tries} times in a row: {reason}")

    def _wait(self, now: float, reason: str) -> None:
        if self.tries >= self._limit:
            self.given_up = reason
        self._not_before = now + pause_after(self.tries)


def pause_after(tries: int) -> float:
    """Seconds before the next start, after `tries` that were no use."""
    return 0.0 if tries == 0 else min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(tries - 1, 32))
