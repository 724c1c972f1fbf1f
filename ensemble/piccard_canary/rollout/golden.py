"""What two versions make of the same golden prompts: how likely each finds the same continuations."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, log
from statistics import fmean

# Fewer prompts tell too little of a mean.
LEAST_PROMPTS = 8


@dataclass(frozen=True, slots=True)
class GoldenScore:
    """One version's log-probability of one continuation.

    Attributes:
        logprob: of all its tokens together, natural logarithm; it may be no finite number.
        pieces: the texts of the tokens of prompt and continuation, but for the first one, which nothing predicts.
        tokens: of the continuation.
    """

    logprob: float
    pieces: tuple[str, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class GoldenComparison:
    """The scores of both versions, paired by prompt.

    Attributes:
        canary, stable: a score a prompt; empty where there is a problem.
        text_bytes: of each continuation, in UTF-8.
        problem: why there are no scores; empty where there are.
    """

    canary: Sequence[GoldenScore] = ()
    stable: Sequence[GoldenScore] = ()
    text_bytes: Sequence[int] = ()
    problem: str = ""

    def __post_init__(self) -> None:
        if not self.problem and not len(self.canary) == len(self.stable) == len(self.text_bytes) >= LEAST_PROMPTS:
            raise ValueError(f"golden prompts come in pairs, {LEAST_PROMPTS} at least")

    @property
    def same_tokens(self) -> bool:
        """Whether both versions cut every text into the same tokens, so that one token is as long for both."""
        return all(
            (one.pieces, one.tokens) == (other.pieces, other.tokens)
            for one, other in zip(self.canary, self.stable, strict=True)
        )

    @property
    def unit(self) -> str:
        """What log-probabilities are told in."""
        return "nats a token" if self.same_tokens else "bits a byte"

    @property
    def bound_scale(self) -> float:
        """What a bound in nats a token is in this unit: by bytes, that of stable's tokens."""
        if self.same_tokens:
            return 1.0
        return sum(score.tokens for score in self.stable) / (sum(self.text_bytes) * log(2.0))

    def without_number(self) -> tuple[int, int]:
        """Continuations of which canary and stable give no finite log-probability."""
        canary, stable = (sum(not isfinite(one.logprob) for one in of) for of in (self.canary, self.stable))
        return canary, stable

    def means(self) -> tuple[float, float]:
        """Mean over the prompts of canary's and stable's log-probability, in `unit`."""
        return fmean(self._of(self.canary)), fmean(self._of(self.stable))

    def drops(self) -> list[float]:
        """By how much canary's log-probability of each continuation is lower than stable's, in `unit`."""
        return [one - other for one, other in zip(self._of(self.stable), self._of(self.canary), strict=True)]

    def _of(self, scores: Sequence[GoldenScore]) -> list[float]:
        if self.same_tokens:
            return [score.logprob / score.tokens for score in scores]
        return [score.logprob / (size * log(2.0)) for score, size in zip(scores, self.text_bytes, strict=True)]
