"""The piccard command: reads the command line and prints what came of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from piccard.errors import OperationError
from piccard.outcome import Outcome

app = typer.Typer(
    name="piccard",
    help="DeepSeek models on NVIDIA Triton Inference Server, with canary routing between versions.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

DEFAULT_HOME = Path(os.environ.get("PICCARD_HOME", ".piccard"))

Home = Annotated[Path, typer.Option("--home", help="The home; $PICCARD_HOME where it is set.")]
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


@app.command()
def init(
    directory: Annotated[Path | None, typer.Argument(help="The home to make; else that of --home.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Checkpoint of versions 1 and 2; else the demo's.")] = None,
    runner: Annotated[
        str, typer.Option(help="torch, or scripted: a double without a model, for fault tests.")
    ] = "torch",
    home: Home = DEFAULT_HOME,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Make a home with versions 1 (stable) and 2 (canary at 10 %)."""
    from piccard_contract.version_file import Runner

    from piccard.home_init import init_home, shipped_versions
    from piccard.installation import demo_checkpoint

    if runner not in list(Runner):
        raise OperationError(f"--runner takes {', '.join(Runner)}, not {runner!r}", exit_code=2)
    folder = checkpoint or (Path("scripted") if runner == Runner.SCRIPTED else demo_checkpoint())
    name = str(folder) if runner == Runner.SCRIPTED else str(folder.absolute())
    show(init_home(directory or home, shipped_versions(name, Runner(runner)), dry_run=dry_run), as_json=as_json)


@app.command()
def serve(
    home: Home = DEFAULT_HOME,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    grpc_port: Annotated[int, typer.Option(min=1, max=65535)] = 8001,
    metrics_port: Annotated[int, typer.Option(min=1, max=65535)] = 8002,
    health_port: Annotated[int, typer.Option(min=1, max=65535, help="/livez and /readyz.")] = 8003,
    exit_timeout: Annotated[int, typer.Option(min=0, help="Seconds for streams in flight at the end.")] = 30,
    verbose: Annotated[bool, typer.Option(help="Have tritonserver log every request.")] = False,
) -> None:
    """Run the server of a home in the foreground; SIGINT and SIGTERM end it in order."""
    from piccard.server_settings import ServerSettings
    from piccard.supervisor import Supervisor, print_line

    settings = ServerSettings(host, http_port, grpc_port, metrics_port, health_port, exit_timeout, verbose)
    raise typer.Exit(Supervisor(home, settings, print_line).run())
