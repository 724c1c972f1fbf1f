"""What is known of finished requests, as arrays: one row a request that one version took."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Observation:
    """One request at one version.

    Attributes:
        failed: the version did not bring it to its end, whether or not another one did. In-band errors count.
        truncated: it failed after its first token.
        fallback: another version took it over.
        first_token, token_gap: seconds to the first token, and between two tokens on average; NaN where unknown.
        first_load, gap_load: requests of the version in flight on average while the first token was waited for, and
            after it. NaN where unknown.
        others: requests of other versions in flight when it began.
        prompt_tokens: of its prompt.
        shadow: it was mirrored, and nobody was answered: its latencies count, and it is no request.
        completion_tokens: of its answer.
    """

    failed: bool = False
    truncated: bool = False
    fallback: bool = False
    first_token: float = float("nan")
    token_gap: float = float("nan")
    first_load: float = float("nan")
    gap_load: float = float("nan")
    others: float = 0.0
    prompt_tokens: int = 0
    shadow: bool = False
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Observations:
    """The same of n requests: every field is an array [n], of bool or float64."""

    failed: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    fallback: NDArray[np.bool_]
    first_token: NDArray[np.float64]
    token_gap: NDArray[np.float64]
    first_load: NDArray[np.float64]
    gap_load: NDArray[np.float64]
    others: NDArray[np.float64]
    prompt_tokens: NDArray[np.float64]
    shadow: NDArray[np.bool_]
    completion_tokens: NDArray[np.float64]

    @classmethod
    def of(cls, rows: Iterable[Observation]) -> Self:
        """Arrays of single observations."""
        kept = list(rows)
        flags = {"failed", "truncated", "fallback", "shadow"}
        return cls(
            **{
                field.name: np.array(
                    [getattr(row, field.name) for row in kept], dtype=bool if field.name in flags else np.float64
                )
                for field in fields(cls)
            }
        )

    def joined(self, other: Self) -> Self:
        """These and others."""
        parts = {
            field.name: np.concatenate([getattr(self, field.name), getattr(other, field.name)])
            for field in fields(self)
        }
        return replace(self, **parts)

    def as_shadows(self) -> Self:
        """The same as if they were mirrored; those that failed are no half of a pair."""
        kept = ~self.failed
        parts = {field.name: getattr(self, field.name)[kept] for field in fields(self)}
        return replace(self, **parts | {"shadow": np.ones(int(kept.sum()), dtype=bool)})

    def __len__(self) -> int:
        return len(self.failed)
