"""Counts of the last seconds."""

import math
from collections import deque
from dataclasses import dataclass

# A window is forgotten in parts of this many to one.
SLOTS = 10


@dataclass(frozen=True, slots=True)
class Counts:
    """Requests, and how many of them were `events`."""

    requests: int = 0
    events: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(self.requests + other.requests, self.events + other.events)


class SlidingCounts:
    """Counts over a window of `window` seconds, exact to a tenth of it. It reads no clock and takes no lock.

    A clock that goes back by more than that tenth, or another window, begins anew: better nothing than old news.
    """

    __slots__ = ("_slots", "_window")

    def __init__(self) -> None:
        self._window = 0.0
        # (number of the slot, its counts), rising.
        self._slots: deque[tuple[int, Counts]] = deque()

    def add(self, now: float, window: float, counts: Counts) -> None:
        """Count at the moment `now`, in seconds of any clock."""
        number = self._follow(now, window)
        if self._slots and self._slots[-1][0] >= number:
            # Two threads may read the clock in one order and come here in the other.
            newest, before = self._slots.pop()
            self._slots.append((newest, before + counts))
        else:
            self._slots.append((number, counts))

    def totals(self, now: float, window: float) -> Counts:
        """What was counted in the last `window` seconds."""
        self._follow(now, window)
        return sum((counts for _, counts in self._slots), Counts())

    def clear(self) -> None:
        """Forget everything."""
        self._slots.clear()

    def _follow(self, now: float, window: float) -> int:
        number = math.floor(now / window * SLOTS)
        if window != self._window or (self._slots and number < self._slots[-1][0] - 1):
            self._slots.clear()
            self._window = window
        while self._slots and self._slots[0][0] <= number - SLOTS:
            self._slots.popleft()
        return number
