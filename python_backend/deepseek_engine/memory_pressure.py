"""How full the cache is, in levels that say what is done about it."""

from enum import IntEnum

from piccard_contract.errors import ErrorCode, RequestError


class Pressure(IntEnum):
    """What is done at a level, and at all below it."""

    NONE = 0
    TIGHT = 1
    """Prefixes that nobody uses are dropped, and prompts are computed in chunks of half the size."""
    SCARCE = 2
    """New prompts of more than a sixteenth of the cache are refused; a better priority takes a worse one's blocks."""
    FULL = 3
    """New requests are refused."""


# The share of blocks in use at which a level begins; it ends when the share has fallen below the second.
_BOUNDS = {Pressure.TIGHT: (0.80, 0.75), Pressure.SCARCE: (0.90, 0.85), Pressure.FULL: (0.95, 0.90)}
LONG_PROMPT = 1 / 16
"""Of the cache's tokens: a prompt of more is long."""


class MemoryPressure:
    """Follows the share of the cache's blocks that sequences hold.

    Args:
        capacity: tokens of the cache.

    Attributes:
        level: the present one.
    """

    def __init__(self, capacity: int) -> None:
        self._long = int(capacity * LONG_PROMPT)
        self.level = Pressure.NONE

    def observe(self, share: float) -> None:
        """Bring the level up to the share in use, 0 to 1."""
        self.level = max(
            (level for level, (enter, leave) in _BOUNDS.items() if share >= (leave if self.level >= level else enter)),
            default=Pressure.NONE,
        )

    def check(self, num_prompt: int, retry_after: float) -> None:
        """Raises RequestError OVERLOADED where a new prompt of so many tokens is not taken at the present level."""
        if self.level is Pressure.FULL:
            raise RequestError(
                ErrorCode.OVERLOADED,
                "the version's cache is full; send the request again later",
                retry_after=retry_after,
            )
        if self.level is Pressure.SCARCE and num_prompt > self._long:
            raise RequestError(
                ErrorCode.OVERLOADED,
                f"the version's cache is nearly full and takes prompts of at most {self._long} tokens for now, not of "
                f"{num_prompt}; send the request again later",
                retry_after=retry_after,
            )
