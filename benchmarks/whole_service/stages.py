"""What streams felt between two moments: tokens a second, time between tokens, time to the first."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from whole_service.clients import Record


@dataclass(frozen=True, slots=True)
class Stage:
    """A stretch of a run, from `begin` to `end` in seconds of `time.monotonic()`."""

    name: str
    begin: float
    end: float

    def figures(self, records: Iterable[Record], version: int | None = None) -> dict[str, Any]:
        """What the streams of `version`, or of all, felt: milliseconds, and tokens a second.

        The time between tokens is that between two responses of a stream; one may carry more than one token where
        its reader lags, so the time a token of whole streams stands beside it: from the first response to the last,
        over the tokens after the first response.
        """
        chosen = [record for record in records if version is None or record.version == version]
        gaps, tokens, responses = [], 0, 0
        for record in chosen:
            inside = [(when, count) for when, count in record.answers if self.begin <= when < self.end]
            tokens += sum(count for _, count in inside)
            responses += len(inside)
            gaps += [later - earlier for (earlier, _), (later, _) in pairwise(inside)]
        begun = [record for record in chosen if self.begin <= record.began < self.end]
        firsts = [record.answers[0][0] - record.began for record in begun if record.answers]
        each = [
            (record.answers[-1][0] - record.answers[0][0]) / (record.tokens - record.answers[0][1])
            for record in chosen
            if len(record.answers) > 1 and self.begin <= record.answers[0][0] and record.answers[-1][0] < self.end
        ]
        return {
            "seconds": round(self.end - self.begin, 3),
            "streams_begun": len(begun),
            "tokens_per_second": round(tokens / (self.end - self.begin), 1),
            "tokens_per_response": round(tokens / responses, 3) if responses else None,
            "between_tokens_ms": _percentiles(gaps),
            "per_token_ms": _percentiles(each),
            "first_token_ms": _percentiles(firsts),
        }


def _percentiles(seconds: list[float]) -> dict[str, float] | None:
    """p50, p99 and the longest, in milliseconds; None where there is nothing to tell of."""
    if not seconds:
        return None
    p50, p99 = np.percentile(seconds, [50, 99])
    return {name: round(1000 * float(value), 3) for name, value in (("p50", p50), ("p99", p99), ("max", max(seconds)))}
