"""The thread that sends every response, so that the engine never waits for a consumer."""

import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from itertools import count

from piccard_contract.errors import RequestError

from deepseek_engine.request import EngineOutput
from deepseek_engine.send_budget import SendBudget

_log = logging.getLogger(__name__)

# Sends one response: outputs since the last one, the error that ended the request, whether it is the last.
Send = Callable[[list[EngineOutput], RequestError | None, bool], None]

# Whether the consumer has taken that many responses.
Taken = Callable[[int], bool]

# Seconds between two looks at whether a response was taken.
TAKEN_POLL = 0.001

# Seconds after which a consumer that takes nothing is not waited for any more: it may hang for another reason, and a
# response that follows may then add to it (piccard_contract.receipts), but a client that waits for ever is no better.
TAKEN_LIMIT = 5.0


def always(sent: int) -> bool:
    """A consumer that tells nothing, so that nobody waits for it."""
    return True


class _State(Enum):
    # Nothing to send.
    IDLE = auto()
    # Waits for its interval to pass.
    TIMED = auto()
    # Waits for the thread.
    READY = auto()
    SENDING = auto()
    CLOSED = auto()


class Outbox:
    """What one request has to send. Made by `Responder.outbox`; a `Sink` of the engine's loop.

    Outputs that come while a response is on its way, or before the interval has passed, go into one response. After
    the last one everything is ignored, so that exactly one final response is sent.
    """

    def __init__(
        self, responder: "Responder", send: Send, *, hold: bool, interval: float, relay: float, taken: Taken
    ) -> None:
        self._responder = responder
        self.send = send
        self.hold = hold
        self.interval = interval
        self.relay = relay
        self.taken = taken
        self.sent = 0
        self.sent_tokens = False
        self.state = _State.IDLE
        self.pending: list[EngineOutput] = []
        self.error: RequestError | None = None
        self.announced = False
        self.ended = False
        self.next_at = 0.0

    def put(self, outputs: list[EngineOutput], *, last: bool) -> None:
        """Send these outputs; `last` ends the request."""
        self._responder.take(self, outputs, None, last)

    def fail(self, error: RequestError) -> None:
        """End the request with an error, after what is still to be sent."""
        self._responder.take(self, [], error, True)

    def announce(self) -> None:
        """Send a response without outputs now."""
        self._responder.take(self, [], None, False)


class Responder:
    """Sends the responses of all requests, in turn, on one thread.

    First tokens go before all others and never wait; the rest keeps to a budget of time. What a consumer has not yet
    taken is followed by nothing: the next response carries all that comes until then.

    Args:
        clock: seconds, monotonic.
        work: seconds of a core that the calling thread has used.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, work: Callable[[], float] = time.thread_time
    ) -> None:
        self._clock = clock
        self._work = work
        self._changed = threading.Condition()
        self._budget = SendBudget()
        self._urgent: deque[Outbox] = deque()
        self._ready: deque[Outbox] = deque()
        self._timed: list[tuple[float, int, Outbox]] = []
        # Ready, but the response before was not taken; with the time until which that is waited for.
        self._held: list[tuple[float, Outbox]] = []
        self._look_at = 0.0
        self._order = count()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="responder", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def outbox(
        self, send: Send, *, hold: bool = False, interval: float = 0.0, relay: float = 0.0, taken: Taken = always
    ) -> Outbox:
        """Where a request's outputs go.

        Args:
            send: called on the responder's thread; what it raises is logged and ends nothing.
            hold: send one response only, the last.
            interval: seconds between responses; the first and the last do not wait.
            relay: what passing a response on costs others, in multiples of its sending.
            taken: asked before every response but the first.
        """
        return Outbox(self, send, hold=hold, interval=interval, relay=relay, taken=taken)

    def stop(self, timeout: float = 5.0) -> None:
        """End the thread after everything that is ready was sent, to those who take it within `timeout` seconds."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def take(self, outbox: Outbox, outputs: list[EngineOutput], error: RequestError | None, last: bool) -> None:
        """Add to what `outbox` has to send; nothing once it has ended."""
        with self._changed:
            if outbox.ended:
                return
            outbox.pending.extend(outputs)
            outbox.error = error
            outbox.ended = last
            outbox.announced = outbox.announced or not (outputs or last)
            self._schedule(outbox)

    def send_next(self) -> bool:
        """Send one response if one is due; returns whether there was one."""
        with self._changed:
            outbox = self._due()
        if outbox is None:
            return False
        self._send(outbox)
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                outbox = self._due()
                while outbox is None:
                    if self._stopping and not self._held:
                        return
                    self._changed.wait(self._pause())
                    outbox = self._due()
            self._send(outbox)

    def _schedule(self, outbox: Outbox) -> None:
        if outbox.state not in (_State.IDLE, _State.TIMED):
            return
        if outbox.ended or outbox.announced or not (outbox.hold or self._clock() < outbox.next_at):
            self._make_ready(outbox)
            self._changed.notify()
        elif not outbox.hold and outbox.state is _State.IDLE:
            outbox.state = _State.TIMED
            heapq.heappush(self._timed, (outbox.next_at, next(self._order), outbox))
            self._changed.notify()

    def _due(self) -> Outbox | None:
        now = self._clock()
        while self._timed and self._timed[0][0] <= now:
            outbox = heapq.heappop(self._timed)[2]
            # One that has ended meanwhile did not wait.
            if outbox.state is _State.TIMED:
                self._make_ready(outbox)
        self._look_at_held(now)
        urgent = self._first(self._urgent, now)
        if urgent is None and self._ready and (self._stopping or not self._budget.rest(now)):
            return self._first(self._ready, now)
        return urgent

    def _first(self, queue: deque[Outbox], now: float) -> Outbox | None:
        """The first whose consumer has taken what it was sent; those before it are held."""
        while queue:
            outbox = queue.popleft()
            if outbox.taken(outbox.sent):
                return outbox
            self._held.append((now + TAKEN_LIMIT, outbox))
        return None

    def _look_at_held(self, now: float) -> None:
        if now < self._look_at:
            return
        self._look_at = now + TAKEN_POLL
        held, self._held = self._held, []
        for limit, outbox in held:
            if now >= limit:
                outbox.taken = always
            if outbox.taken(outbox.sent):
                self._make_ready(outbox)
            else:
                self._held.append((limit, outbox))

    def _make_ready(self, outbox: Outbox) -> None:
        outbox.state = _State.READY
        (self._ready if outbox.sent_tokens else self._urgent).append(outbox)

    def _pause(self) -> float | None:
        """Seconds until something may become due by itself."""
        now = self._clock()
        waits = [self._timed[0][0] - now] if self._timed else []
        if self._ready:
            waits.append(self._budget.rest(now))
        if self._held:
            waits.append(self._look_at - now)
        return min(waits) if waits else None

    def _send(self, outbox: Outbox) -> None:
        with self._changed:
            outbox.state = _State.SENDING
            outputs, outbox.pending = outbox.pending, []
            final, error = outbox.ended, outbox.error
            outbox.announced = False
            started, worked = self._clock(), self._work()
        went = True
        try:
            outbox.send(outputs, error, final)
        except Exception:
            _log.exception("a response could not be sent")
            went = False
        with self._changed:
            # What never went is never taken either.
            outbox.sent += went
            outbox.state = _State.CLOSED if final else _State.IDLE
            now = self._clock()
            self._budget.spend(started, self._work() - worked, outbox.relay)
            if outputs:
                outbox.sent_tokens = True
                outbox.next_at = now + outbox.interval
            if not final and (outbox.pending or outbox.announced or outbox.ended):
                self._schedule(outbox)
