"""How much of the machine responses may take."""

# Of one core, what sending and passing on may take: a router is one Python process, which answers late from there on.
SHARE = 0.5

# Debts of less seconds are not worth a wait, whose wake-up costs as much as a small response.
GRAIN = 0.004


class SendBudget:
    """Bounds what responses cost, so that under load each carries more tokens and leaves the cores to the engine.

    A response costs whoever passes it on as well as its sender. After each the sender rests until, at `SHARE` of a
    core, all of them have had time for it. While there is time to spare nothing waits.
    """

    def __init__(self) -> None:
        # When those who pass responses on are done with what was sent.
        self._done_at = 0.0
        self._resting = False

    def spend(self, started: float, work: float, relay: float) -> None:
        """Account for a response.

        Args:
            started: when its sending began, monotonic seconds.
            work: seconds of a core that its sending took.
            relay: what passing it on costs, in multiples of `work`.
        """
        self._done_at = max(self._done_at, started) + work * (1.0 + relay) / SHARE

    def rest(self, now: float) -> float:
        """Seconds to wait before the next response; 0.0 where it may go."""
        debt = self._done_at - now
        self._resting = debt > (0.0 if self._resting else GRAIN)
        return debt if self._resting else 0.0
