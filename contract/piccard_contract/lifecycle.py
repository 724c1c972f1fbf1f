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

# Retired versions that a home keeps, the newest; of older ones nothing stays but their lines in the audit log.
KEPT_RETIRED = 10

STATE_MEANINGS: dict[VersionState, str] = {
    _S.STAGED: "published while no server ran; the next start loads it",
    _S.LOADING: "the server starts its process",
    _S.PROBING: "its process runs and answers the golden prompts",
    _S.READY: "loaded and good; gets requests that name it, and as a fallback",
    _S.CANARY: "gets the canary's share of the traffic",
    _S.STABLE: "gets all other traffic; the link names it",
    _S.PREVIOUS: "was stable before, and is again by one rename; takes over what a newer stable fails",
    _S.DRAINING: "gets no new request; ends after its last stream",
    _S.RETIRED: f"has ended; the last {KEPT_RETIRED} keep their folders, their numbers are never used again",
    _S.FAILED: "could not be loaded, failed its probe, or could not be started again; its reason says why",
}

# Every move that a version may make, and what makes it.
MOVE_CAUSES: dict[tuple[VersionState, VersionState], str] = {
    (_S.STAGED, _S.LOADING): "`publish` with a server, or the server's start",
    (_S.STAGED, _S.FAILED): "its load was to begin, and state.json could not be written",
    (_S.STAGED, _S.RETIRED): "`retire` before it was ever loaded",
    (_S.LOADING, _S.PROBING): "the server has loaded it",
    (_S.LOADING, _S.FAILED): "the server could not load it, or the load was interrupted",
    (_S.PROBING, _S.READY): "every golden prompt was answered, twice the same",
    (_S.PROBING, _S.FAILED): "a golden prompt was not answered, or the probe was interrupted",
    (_S.READY, _S.CANARY): "`canary set`, or it is the canary and was loaded again",
    (_S.READY, _S.STABLE): "`promote`, or it is stable and was loaded again",
    (_S.READY, _S.PREVIOUS): "it is previous and was loaded again",
    (_S.READY, _S.DRAINING): "`retire`",
    (_S.READY, _S.FAILED): "its process died and could not be started again, or a start could not load it",
    (_S.CANARY, _S.READY): "`canary off`, another canary, or `promote` of another",
    (_S.CANARY, _S.STABLE): "`promote`",
    (_S.CANARY, _S.FAILED): "its process died and could not be started again, or a start could not load it",
    (_S.STABLE, _S.PREVIOUS): "`promote` of another, or `rollback`",
    (_S.STABLE, _S.FAILED): "a start could not load it",
    (_S.PREVIOUS, _S.STABLE): "`rollback`, or `promote`",
    (_S.PREVIOUS, _S.READY): "another became previous, or `retire` begins",
    (_S.PREVIOUS, _S.CANARY): "`canary set`: a second chance after a rollback",
    (_S.PREVIOUS, _S.FAILED): "its process died and could not be started again, or a start could not load it",
    (_S.DRAINING, _S.RETIRED): "its last stream is over",
    (_S.FAILED, _S.LOADING): "the same `publish` again, `revive`, or the start of a server where it has a role",
    (_S.FAILED, _S.DRAINING): "`retire`",
}

MOVES: dict[VersionState, frozenset[VersionState]] = {
    state: frozenset(to for start, to in MOVE_CAUSES if start is state) for state in VersionState
}

# States in which a version is meant to be loaded by the server.
LOADED_STATES = frozenset({_S.LOADING, _S.PROBING, _S.READY, _S.CANARY, _S.STABLE, _S.PREVIOUS, _S.DRAINING})

# States in which a router may send requests to a version.
SERVING_STATES = frozenset({_S.READY, _S.CANARY, _S.STABLE, _S.PREVIOUS})

# States of a version that has not yet answered its golden prompts.
UNPROVEN_STATES = frozenset({_S.STAGED, _S.LOADING, _S.PROBING})


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
