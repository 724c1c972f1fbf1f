"""The thread that runs an engine."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from piccard_contract.errors import ErrorCode, RequestError

from deepseek_engine.departures import Departures
from deepseek_engine.failures import failure_of
from deepseek_engine.pulse import Pulse
from deepseek_engine.request import EngineOutput, EngineRequest, EngineStats

if TYPE_CHECKING:
    from deepseek_engine.engine import EngineBackend

_log = logging.getLogger(__name__)

# A pause without end is slept in parts of this many seconds.
LONGEST_WAIT = 3600.0


class Sink(Protocol):
    """Where a request's outputs go. Called on the engine's thread: it takes and returns, and does not raise."""

    def put(self, outputs: list[EngineOutput], *, last: bool) -> None:
        """Outputs of one step; `last` once every choice has ended."""
        ...

    def fail(self, error: RequestError) -> None:
        """The request ends without further outputs."""
        ...


@dataclass(frozen=True, slots=True)
class _Submit:
    request: EngineRequest
    sink: Sink


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str
    error: RequestError


@dataclass(slots=True)
class _Active:
    sink: Sink
    # Choices that have not ended.
    running: set[int]


class EngineLoop:
    """Runs an engine backend on a thread of its own; every method may be called from any thread.

    The thread sleeps while the engine has no work. Each request ends exactly once, through its sink: with its last
    outputs, or with the error that ended it.

    Args:
        backend: the engine; nothing else may touch it once the loop has started.
        on_fatal: called on the engine's thread when the engine itself has failed, after all requests were failed.
        pause: seconds until the next step is worth while, for a backend that waits for time; None steps at once.
        pulse: shows that the thread gets on.
    """

    def __init__(
        self,
        backend: "EngineBackend",
        *,
        on_fatal: Callable[[BaseException], None],
        pause: Callable[[], float] | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        self._backend = backend
        self._pulse = pulse or Pulse()
        self._on_fatal = on_fatal
        self._pause = pause
        self._woken = threading.Condition()
        self._commands: deque[_Submit | _Abort] = deque()
        self._active: dict[str, _Active] = {}
        self._departures = Departures()
        self._stopping = False
        self._stats = backend.stats()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def stats(self) -> EngineStats:
        """The engine's gauges and counters after its last step."""
        return self._stats

    @property
    def alive(self) -> bool:
        """Whether the thread runs, so that what is submitted is worked on."""
        return self._thread.is_alive() and not self._stopping

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, request: EngineRequest, sink: Sink) -> None:
        """Add a request; what the engine refuses comes through the sink too."""
        if not self._command(_Submit(request, sink)):
            sink.fail(_unloaded())

    def abort(self, request_id: str, error: RequestError) -> None:
        """End a request with `error`; nothing where it has ended. A step for it alone is given up."""
        self._command(_Abort(request_id, error))

    def stop(self, timeout: float = 5.0) -> None:
        """End the thread after the step under way; requests that still run are failed."""
        with self._woken:
            self._stopping = True
            self._woken.notify()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _command(self, command: _Submit | _Abort) -> bool:
        with self._woken:
            if self._stopping:
                return False
            if isinstance(command, _Abort):
                self._departures.add(command.request_id)
            self._commands.append(command)
            self._woken.notify()
        return True

    def _run(self) -> None:
        try:
            while self._wait():
                self._pulse.begin()
                self._obey()
                if self._backend.has_work():
                    self._dispatch(self._backend.step(self._departures))
                self._stats = self._backend.stats()
                self._pulse.end()
            self._fail_all(_unloaded())
        # The state of the engine is unknown from here on, and so is that of the process.
        except BaseException as error:
            _log.critical("the engine failed", exc_info=error)
            with self._woken:
                self._stopping = True
            try:
                self._fail_all(failure_of(error))
            except Exception:
                _log.exception("the requests of a failed engine could not be ended")
            self._on_fatal(error)

    def _wait(self) -> bool:
        """Sleep until there is something to do; False once the loop has to end."""
        with self._woken:
            while not self._commands and not self._stopping:
                seconds = self._idle_seconds()
                if seconds == 0.0:
                    break
                self._woken.wait(seconds)
            return not self._stopping

    def _idle_seconds(self) -> float | None:
        if not self._backend.has_work():
            return None
        return min(self._pause(), LONGEST_WAIT) if self._pause else 0.0

    def _obey(self) -> None:
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, _Submit):
                self._add(command.request, command.sink)
            else:
                self._departures.remove(command.request_id)
                self._end(command.request_id, command.error)

    def _add(self, request: EngineRequest, sink: Sink) -> None:
        try:
            self._backend.add(request)
        except Exception as error:
            if not isinstance(error, RequestError):
                _log.error("request %s could not be added", request.id, exc_info=error)
            sink.fail(failure_of(error))
        else:
            self._active[request.id] = _Active(sink, set(range(request.params.n)))

    def _end(self, request_id: str, error: RequestError) -> None:
        active = self._active.pop(request_id, None)
        if active is None:
            return
        try:
            self._backend.abort(request_id)
        finally:
            active.sink.fail(error)

    def _dispatch(self, outputs: list[EngineOutput]) -> None:
        groups: dict[str, list[EngineOutput]] = {}
        for output in outputs:
            groups.setdefault(output.request_id, []).append(output)
        for request_id, group in groups.items():
            # Outputs of a request that has ended here, such as its abort's, are nobody's.
            if request_id in self._active:
                self._deliver(request_id, group)

    def _deliver(self, request_id: str, outputs: list[EngineOutput]) -> None:
        active = self._active[request_id]
        failed = next((output.error for output in outputs if output.error is not None), None)
        if failed is not None:
            # One choice that fails ends the request: its client gets no part of an answer as if it were whole, and no
            # response that holds nothing.
            told = [output for output in outputs if output.error is None]
            if told:
                active.sink.put(told, last=False)
            self._end(request_id, RequestError(failed.code, failed.message, retry_after=failed.retry_after))
            return
        active.running.difference_update(output.choice for output in outputs if output.finish_reason is not None)
        if not active.running:
            del self._active[request_id]
        active.sink.put(outputs, last=not active.running)

    def _fail_all(self, error: RequestError) -> None:
        for active in self._active.values():
            active.sink.fail(error)
        self._active.clear()
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, _Submit):
                command.sink.fail(error)


def _unloaded() -> RequestError:
    return RequestError(ErrorCode.UNAVAILABLE, "the version is being unloaded; send the request again")
