"""Requests that nobody waits for any more, and the end of a step that is for none but them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StepGivenUpError(Exception):
    """A step was ended early: all of its requests are about to be aborted."""


class Interrupt:
    """Ends one step early. Set by any thread, once; looked at by the one that runs the step."""

    __slots__ = ("_lock", "_set", "_stop")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._set = False
        self._stop: Callable[[], None] | None = None

    def set(self) -> None:
        """Have the step end where it next looks."""
        with self._lock:
            self._set = True
            if self._stop is not None:
                self._stop()

    def check(self) -> None:
        """Raises StepGivenUpError where it is set."""
        if self._set:
            raise StepGivenUpError

    @contextmanager
    def stopping(self, stop: Callable[[], None]) -> Iterator[None]:
        """Within it `set` calls `stop` too, on its own thread, for work that looks at nothing but its own flag."""
        with self._lock:
            self._stop = stop
            if self._set:
                stop()
        try:
            yield
        # What stopped work raises is its own; why it did is told in the place of that.
        except Exception as error:
            if self._set:
                raise StepGivenUpError from error
            raise
        finally:
            with self._lock:
                self._stop = None


class Departures:
    """The requests whose abort is on its way to the engine.

    An engine ends a request between two steps, and a step that reads a long prompt takes a second on a CPU. So it is
    interrupted once all of its requests are here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids: set[str] = set()
        self._step: tuple[frozenset[str], Interrupt] | None = None

    def add(self, request_id: str) -> None:
        """Any thread: the request's abort will come."""
        with self._lock:
            self._ids.add(request_id)
            self._look()

    def remove(self, request_id: str) -> None:
        """The abort has come; nothing where the request is not here."""
        with self._lock:
            self._ids.discard(request_id)

    @contextmanager
    def interrupting(self, request_ids: frozenset[str]) -> Iterator[Interrupt]:
        """What ends the step of these requests, which runs within it."""
        interrupt = Interrupt()
        with self._lock:
            self._step = request_ids, interrupt
            self._look()
        try:
            yield interrupt
        finally:
            with self._lock:
                self._step = None

    def _look(self) -> None:
        if self._step is not None and self._step[0] <= self._ids:
            self._step[1].set()
