"""The generations under way, by the token that cancels them."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from deepseek_engine.generation import Generation

# Cancels that came before their request was read: how long and how many of them are remembered.
EARLY_SECONDS = 30.0
EARLY_COUNT = 1024


class Reply(Protocol):
    """Where the responses of one request go. An adapter to a server implements it; methods are thread-safe."""

    def send(self, outputs: dict[str, list[Any]], *, final: bool) -> None:
        """Send tensors, name -> values; nothing is sent after the final one."""
        ...

    def is_cancelled(self) -> bool:
        """Whether the client is gone; False once the final response was sent."""
        ...


@dataclass(slots=True, eq=False)
class Flight:
    """A generation under way and who waits for it.

    Attributes:
        direct: whether no router stands between the client and the version.
        cancelled: whether its token was sent.
    """

    generation: Generation
    reply: Reply
    direct: bool
    cancelled: bool = False


class Flights:
    """All flights of a version; every method may be called from any thread.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Condition()
        self._by_token: dict[str, Flight] = {}
        self._direct: set[Flight] = set()
        self._early: OrderedDict[str, float] = OrderedDict()

    def add(self, flight: Flight) -> bool:
        """Register a flight; False where its cancel has come already, and it shall not start."""
        with self._lock:
            token = flight.generation.cancel_token
            early = self._early.pop(token, None)
            if early is not None and self._clock() - early < EARLY_SECONDS:
                return False
            self._by_token[token] = flight
            if flight.direct:
                self._direct.add(flight)
            self._lock.notify_all()
            return True

    def remove(self, flight: Flight) -> None:
        """Forget a flight; nothing where it is not known."""
        with self._lock:
            self._by_token.pop(flight.generation.cancel_token, None)
            self._direct.discard(flight)

    def cancel(self, token: str) -> Flight | None:
        """The flight that holds `token`; where there is none (yet), the token is remembered for a while."""
        with self._lock:
            flight = self._by_token.get(token)
            if flight is not None:
                flight.cancelled = True
            else:
                self._early[token] = self._clock()
                while len(self._early) > EARLY_COUNT:
                    self._early.popitem(last=False)
            return flight

    def wait_any(self, timeout: float) -> None:
        """Wait until there are any, for `timeout` seconds at most."""
        with self._lock:
            if not self._by_token:
                self._lock.wait(timeout)

    def direct(self) -> list[Flight]:
        """Those without a router."""
        with self._lock:
            return list(self._direct)

    def tokens(self) -> list[str]:
        """The cancel tokens of all."""
        with self._lock:
            return list(self._by_token)
