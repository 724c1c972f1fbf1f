"""One thread that notices what the pump threads cannot: they are blocked on versions that are dead or stuck."""

import threading
from collections.abc import Callable, Collection

from piccard_contract.errors import RequestError

from piccard_canary.attempt import Attempt
from piccard_canary.stream import Stream

# Seconds between two looks.
INTERVAL = 0.025


class Watchdog:
    """Looks at every stream and starts a thread that brings a stuck one to its end.

    Args:
        streams: those in flight now.
        process: tells a version's living process; None where it is dead.
        log: takes a sentence for the server's log.
    """

    def __init__(
        self,
        streams: Callable[[], Collection[Stream]],
        process: Callable[[int], int | None],
        log: Callable[[str], None],
        interval: float = INTERVAL,
    ) -> None:
        self._streams = streams
        self._process = process
        self._log = log
        self._interval = interval
        self._work = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def wake(self) -> None:
        """A stream has begun; without one the thread sleeps."""
        self._work.set()

    def stop(self) -> None:
        """End the thread after its present look."""
        self._stopped = True
        self._work.set()
        self._thread.join(timeout=5.0)

    def look(self) -> int:
        """Look at every stream once; how many there were."""
        streams = self._streams()
        known: dict[int, int | None] = {}

        def process(version: int) -> int | None:
            if version not in known:
                known[version] = self._process(version)
            return known[version]

        for stream in streams:
            found = stream.fault(process)
            if found is not None:
                self._trip(stream, *found)
        return len(streams)

    def _run(self) -> None:
        pause = threading.Event()
        while not self._stopped:
            self._work.wait()
            try:
                # Cleared before the look, so that a stream that begins during it is seen by the next.
                self._work.clear()
                if self.look():
                    self._work.set()
            except Exception as error:
                self._log(f"the watchdog failed and goes on: {error!r}")
                self._work.set()
            pause.wait(self._interval)

    def _trip(self, stream: Stream, attempt: Attempt, error: RequestError) -> None:
        attempt.tripped = True

        def still() -> bool:
            attempt.tripped = False
            found = stream.fault(self._process)
            attempt.tripped = True
            return found is not None and found[0] is attempt

        def take() -> None:
            try:
                stream.give_up(attempt, error, still=still)
            except BaseException as defect:
                self._log(f"a stuck request could not be brought to its end: {defect!r}")
                stream.fail(error)

        try:
            threading.Thread(target=take, name=f"take-over-{attempt.version}", daemon=True).start()
        except RuntimeError:
            # No thread to be had: the client at least gets its error.
            stream.fail(error)
