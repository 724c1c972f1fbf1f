"""One bucket of tokens, whose size and inflow follow how loaded the versions are."""

HIGH_LOAD = 0.7

# A cost is there although sums of floats fall short of it by so much of the bucket.
_ROUNDING = 1e-9


def capacity_at(burst: float, load: float) -> float:
    """Tokens that a bucket holds at a load of 0 to 1: burst x (1 + 0.5 x (1 - load))."""
    return burst * (1.0 + 0.5 * (1.0 - load))


def refill_at(rate: float, load: float) -> float:
    """Tokens a second that a bucket gains: rate x 0.8 above `HIGH_LOAD`, else x 1.2."""
    return rate * (0.8 if load > HIGH_LOAD else 1.2)


class TokenBucket:
    """Begins full. It reads no clock and takes no lock.

    What is taken in any time is at most what the bucket held at its start, and what it gained and got back since.

    Args:
        rate: tokens a second.
        burst: tokens that it holds at full load.
        now: seconds of any clock; one that goes back costs nothing, one that jumps ahead fills the bucket at most.
        load: of the versions, 0 to 1.

    Attributes:
        level: tokens in it; below 0 where more came of what was taken than was expected.
    """

    __slots__ = ("_burst", "_load", "_rate", "_seen", "level")

    def __init__(self, rate: float, burst: float, *, now: float, load: float) -> None:
        self._rate = rate
        self._burst = burst
        self._seen = now
        self._load = load
        self.level = self.capacity

    @property
    def capacity(self) -> float:
        """Tokens that it holds at the present load."""
        return capacity_at(self._burst, self._load)

    @property
    def most(self) -> float:
        """Tokens that it ever holds."""
        return capacity_at(self._burst, 0.0)

    def follow(self, now: float, load: float) -> None:
        """Gain what the time since the last call brings, at the load of then, and go by `load` from now on."""
        gained = max(0.0, now - self._seen) * refill_at(self._rate, self._load)
        self._seen, self._load = now, load
        self.level = min(self.level + gained, self.capacity)

    def resize(self, rate: float, burst: float) -> None:
        """Take other settings; what is in it stays, as far as there is room."""
        self._rate, self._burst = rate, burst
        self.level = min(self.level, self.capacity)

    def wait(self, cost: float) -> float:
        """Seconds until `cost` tokens are in it at the present load, 0 where they are. None of it may ever be more than
        `most`: that never comes."""
        missing = cost - self.level
        return 0.0 if missing <= self._burst * _ROUNDING else missing / refill_at(self._rate, self._load)

    def take(self, cost: float) -> None:
        """Take tokens, whether or not they are there."""
        self.level -= cost

    def give_back(self, tokens: float) -> None:
        """Put tokens back, as far as there is room."""
        self.level = min(self.level + tokens, self.capacity)
