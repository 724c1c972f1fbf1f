"""Tells a process that hangs from one that works: by the signs of life in what it publishes."""

from dataclasses import dataclass

# Seconds that one look may add: while the supervisor itself stood still, or the machine slept, nothing was seen.
MOST_A_LOOK = 2.0


@dataclass(frozen=True, slots=True)
class Signs:
    """What shows that a process moves.

    Attributes:
        pid: another process starts anew.
        updated_at: when it published last, which it does twice a second whatever its engine does.
        busy: whether its engine is at work.
        beats: grows whenever the engine gets on.
    """

    pid: int
    updated_at: float
    busy: bool
    beats: int


class Stillness:
    """For how long one process has given no sign of life, as seen by looks at it."""

    def __init__(self) -> None:
        self._looked_at = 0.0
        self._signs: Signs | None = None
        self._frozen = 0.0
        self._stuck = 0.0

    def look(self, now: float, signs: Signs) -> float:
        """Take a look; returns the seconds for which it has stood still.

        It stands still where it publishes nothing, and where its engine is at work and does not get on.
        """
        before, self._signs = self._signs, signs
        passed = min(MOST_A_LOOK, max(0.0, now - self._looked_at))
        self._looked_at = now
        if before is None or before.pid != signs.pid:
            self._frozen = self._stuck = 0.0
            return 0.0
        self._frozen = self._frozen + passed if signs.updated_at == before.updated_at else 0.0
        same_work = before.busy and signs.busy and signs.beats == before.beats
        self._stuck = self._stuck + passed if same_work else 0.0
        return max(self._frozen, self._stuck)
