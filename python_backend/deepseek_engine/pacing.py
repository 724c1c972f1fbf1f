"""How much prefill a step takes while others decode, from how long steps have taken."""

_SMOOTHING = 0.2


class PrefillPacer:
    """Chooses prefill tokens so that a mixed step takes about `gap` times a step without prefill.

    A step's time is taken as decodes plus prefill tokens times a price each; both are smoothed averages of what was
    seen. Until both are known, and where `gap` is None, the answer is `ceiling`.

    Args:
        ceiling: tokens at most.
        floor: tokens at least, so that a prompt always gets on.
        gap: multiple of a step without prefill, above 1, or None.
    """

    def __init__(self, ceiling: int, floor: int, gap: float | None) -> None:
        self._ceiling = ceiling
        self._floor = min(floor, ceiling)
        self._gap = gap
        self._decode_seconds: float | None = None
        self._token_seconds: float | None = None

    def observe(self, num_decodes: int, num_prefill: int, seconds: float) -> None:
        """Learn from one step: its decodes, its prefill tokens and how long it took."""
        if self._gap is None:
            return
        if num_prefill == 0:
            self._decode_seconds = _smoothed(self._decode_seconds, seconds)
        elif num_decodes == 0 or self._decode_seconds is not None:
            # A step has a price of its own, which a step of decodes alone shows.
            extra = max(seconds - (self._decode_seconds or 0.0), 0.0)
            self._token_seconds = _smoothed(self._token_seconds, extra / num_prefill)

    def chunk(self) -> int:
        """Prefill tokens for the next step that also decodes."""
        if self._gap is None or self._decode_seconds is None or not self._token_seconds:
            return self._ceiling
        wanted = (self._gap - 1.0) * self._decode_seconds / self._token_seconds
        return int(min(max(wanted, self._floor), self._ceiling))


def _smoothed(average: float | None, value: float) -> float:
    return value if average is None else average + _SMOOTHING * (value - average)
