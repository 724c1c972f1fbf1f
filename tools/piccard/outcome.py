"""What a command did, for people and for --json."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one command.

    Attributes:
        what: the command with its arguments.
        changed: whether it changed anything, or with dry_run would have.
        message: one sentence.
        before, after: what changed.
    """

    what: str
    service: str
    changed: bool
    message: str
    dry_run: bool = False
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
