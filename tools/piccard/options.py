"""What many commands take, and how they tell what they did."""

from __future__ import annotations

import json
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from piccard.arguments import file_path, version_number
from piccard.outcome import Outcome

if TYPE_CHECKING:
    from piccard.operation import Operation

DEFAULT_SERVICE = "deepseek"
DEFAULT_HOME = Path(os.environ.get("PICCARD_HOME", ".piccard"))

Home = Annotated[
    Path, typer.Option("--home", parser=file_path, metavar="DIR", help="The home; $PICCARD_HOME where it is set.")
]
VersionNumber = Annotated[int, typer.Argument(parser=version_number, metavar="VERSION", help="Its number.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done and do nothing.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
ServiceName = Annotated[str, typer.Option("--service", help="The service.")]


def show(outcome: Outcome, *, as_json: bool) -> None:
    """Print what a command did."""
    if as_json:
        typer.echo(json.dumps(outcome.as_json(), ensure_ascii=False))
        return
    prefix = "would have: " if outcome.dry_run and outcome.changed else ""
    typer.echo(prefix + outcome.message)


def begin_operation(
    home: Path, service: str, dry_run: bool, *, must_answer: bool = True
) -> AbstractContextManager[Operation]:
    """The surroundings of one command, whose progress goes to standard error."""
    from piccard.operation import operation

    return operation(
        home, service, dry_run=dry_run, must_answer=must_answer, tell=lambda line: typer.echo(line, err=True)
    )
