"""state.json: the truth about a service's versions, and the moves that a version may make."""

from datetime import UTC, datetime
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class VersionState(StrEnum):
    """Where a version is in its life."""

    STAGED = "staged"
    LOADING = "loading"
    PROBING = "probing"
    READY = "ready"
    CANARY = "canary"
    STABLE = "stable"
    PREVIOUS = "previous"
    DRAINING = "draining"
    RETIRED = "retired"
    FAILED = "failed"


_S = VersionState

MOVES: dict[VersionState, frozenset[VersionState]] = {
    _S.STAGED: frozenset({_S.LOADING, _S.FAILED, _S.RETIRED}),
    _S.LOADING: frozenset({_S.PROBING, _S.FAILED}),
    _S.PROBING: frozenset({_S.READY, _S.FAILED}),
    # To previous: a previous version that failed and was loaded again.
    _S.READY: frozenset({_S.CANARY, _S.STABLE, _S.PREVIOUS, _S.DRAINING, _S.FAILED}),
    _S.CANARY: frozenset({_S.READY, _S.STABLE, _S.FAILED}),
    # A rollback sends stable back to previous; a promotion of another does too.
    _S.STABLE: frozenset({_S.PREVIOUS, _S.FAILED}),
    _S.PREVIOUS: frozenset({_S.STABLE, _S.READY, _S.CANARY, _S.FAILED}),
    _S.DRAINING: frozenset({_S.RETIRED, _S.FAILED}),
    _S.RETIRED: frozenset(),
    # A failed version is loaded again, or given up.
    _S.FAILED: frozenset({_S.LOADING, _S.DRAINING, _S.RETIRED}),
}

# States in which a version is meant to be loaded by the server.
LOADED_STATES = frozenset({_S.LOADING, _S.PROBING, _S.READY, _S.CANARY, _S.STABLE, _S.PREVIOUS, _S.DRAINING})

# States in which a router may send requests to a version.
SERVING_STATES = frozenset({_S.READY, _S.CANARY, _S.STABLE, _S.PREVIOUS})


class IllegalMoveError(ValueError):
    """A move that the table does not allow."""


def now() -> str:
    """The time as ISO 8601 in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class VersionRecord(BaseModel):
    """One version's line in state.json."""

    model_config = ConfigDict(extra="forbid")

    state: VersionState
    label: str
    published_at: str
    changed_at: str
    reason: str = ""


class ServiceState(BaseModel):
    """state.json of one service.

    Attributes:
        generation: grows by one with every write.
        next_version: the number that the next publication gets; numbers are never used twice.
        previous_since: when stable became previous; its bake time counts from here.
    """

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_version: Literal[1] = Field(default=1, alias="schema")
    service: str
    generation: int = 0
    next_version: int = 1
    stable: int | None = None
    canary: int | None = None
    previous: int | None = None
    previous_since: str | None = None
    versions: dict[int, VersionRecord] = Field(default_factory=dict)

    def move(self, version: int, to: VersionState, reason: str = "") -> None:
        """Move `version` to state `to`.

        Raises:
            IllegalMoveError: where the table does not allow it, naming what it allows.
        """
        record = self.versions[version]
        if record.state == to:
            return
        if to not in MOVES[record.state]:
            allowed = ", ".join(sorted(MOVES[record.state])) or "nothing"
            raise IllegalMoveError(f"version {version} is {record.state}; it cannot become {to} (allowed: {allowed})")
        record.state, record.reason, record.changed_at = to, reason, now()

    def loaded(self) -> list[int]:
        """Versions that the server is meant to have loaded, in order."""
        return sorted(number for number, record in self.versions.items() if record.state in LOADED_STATES)
