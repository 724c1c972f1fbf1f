"""One trap that a home is in."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One trap that a home is in.

    Attributes:
        trap: its name, for programs.
        problem: what is so, with the path.
        remedy: what to do.
        repair: what --repair does; None where a person has to.
    """

    trap: str
    problem: str
    remedy: str
    repair: Callable[[], object] | None = None
