"""Tells cancel tokens to clients that wait for their first token, a little later than at once.

A first token mostly comes soon and brings the cancel token along. A response of its own before it would cost the time
of a response each time, as a version is called only after that; so it is sent beside the call, and only to who has
waited for a while.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

# Seconds after which a token is told, and between two looks: a client that leaves is cancelled within 200 ms, so the
# token has to be there well before.
DELAY = 0.05
INTERVAL = 0.025


class Announcer:
    """One thread that makes the announcements of a router.

    Args:
        log: takes a sentence for the server's log.
    """

    def __init__(
        self,
        log: Callable[[str], None],
        *,
        delay: float = DELAY,
        interval: float = INTERVAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._delay = delay
        self._interval = interval
        self._clock = clock
        self._due: deque[tuple[float, Callable[[], None]]] = deque()
        self._work = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="announcer", daemon=True)

    def start(self) -> None:
        """Begin to tell."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what was not told is not told any more."""
        self._stopped.set()
        self._work.set()
        self._thread.join(timeout=5.0)

    def put(self, tell: Callable[[], None]) -> None:
        """Call `tell` once the delay is over; it finds out itself whether that is still needed."""
        self._due.append((self._clock() + self._delay, tell))
        self._work.set()

    def look(self) -> int:
        """Tell what is due; how many have still to wait."""
        now = self._clock()
        while self._due and self._due[0][0] <= now:
            _, tell = self._due.popleft()
            try:
                tell()
            except Exception as error:
                # The request goes on without; its pump finds out what is wrong with the client.
                self._log(f"a cancel token could not be announced: {error!r}")
        return len(self._due)

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._work.wait()
            # Cleared before the look, so that what comes during it is seen by the next.
            self._work.clear()
            if self.look():
                self._work.set()
            self._stopped.wait(self._interval)
