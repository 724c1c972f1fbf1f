"""The piccard command: reads the command line and prints what came of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from piccard.arguments import file_path, finite_seconds, host_name, shown, version_number
from piccard.errors import OperationError
from piccard.options import (
    DEFAULT_HOME,
    DEFAULT_SERVICE,
    AsJson,
    DryRun,
    Home,
    ServiceName,
    VersionNumber,
    begin_operation,
    show,
)
from piccard.revival import GIVE_UP_AFTER
from piccard.rollout.cli import rollout_app

app = typer.Typer(
    name="piccard",
    help="DeepSeek models on NVIDIA Triton Inference Server, with canary routing between versions.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

canary_app = typer.Typer(no_args_is_help=True, help="The version that gets a share of the traffic.")
app.add_typer(canary_app, name="canary")
app.add_typer(rollout_app, name="rollout")

key_app = typer.Typer(no_args_is_help=True, help="Keys of the gateway's callers.")
app.add_typer(key_app, name="key")


@app.command()
def init(
    directory: Annotated[
        Path | None, typer.Argument(parser=file_path, metavar="DIR", help="The home to make; else that of --home.")
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(parser=file_path, metavar="DIR", help="Checkpoint of versions 1 and 2; else the demo's."),
    ] = None,
    runner: Annotated[
        str | None,
        typer.Option(help="torch, onnxruntime, or scripted, a double without a model; else torch and onnxruntime."),
    ] = None,
    home: Home = DEFAULT_HOME,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Make a home with versions 1 (stable) and 2 (canary at 10 %)."""
    from piccard_contract.version_file import Runner

    from piccard.home_init import init_home, shipped_versions
    from piccard.installation import demo_checkpoint

    if runner is not None and runner not in list(Runner):
        raise OperationError(f"--runner takes {', '.join(Runner)}, not {shown(runner)}", exit_code=2)
    folder = checkpoint or (Path("scripted") if runner == Runner.SCRIPTED else demo_checkpoint())
    name = str(folder) if runner == Runner.SCRIPTED else str(folder.absolute())
    versions = shipped_versions(name, None if runner is None else Runner(runner))
    outcome = init_home(directory or home, versions, dry_run=dry_run, tell=lambda line: typer.echo(line, err=True))
    show(outcome, as_json=as_json)


@app.command()
def serve(
    home: Home = DEFAULT_HOME,
    host: Annotated[str, typer.Option(parser=host_name, metavar="HOST", help="Address to listen on.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    grpc_port: Annotated[int, typer.Option(min=1, max=65535)] = 8001,
    metrics_port: Annotated[int, typer.Option(min=1, max=65535)] = 8002,
    health_port: Annotated[int, typer.Option(min=1, max=65535, help="/livez and /readyz.")] = 8003,
    gateway: Annotated[bool, typer.Option("--gateway/--no-gateway", help="OpenAI-compatible HTTP.")] = True,
    gateway_host: Annotated[
        str, typer.Option(parser=host_name, metavar="HOST", help="Address that the gateway listens on.")
    ] = "127.0.0.1",
    gateway_port: Annotated[int, typer.Option(min=1, max=65535)] = 8004,
    allow_open_ports: Annotated[
        bool, typer.Option("--allow-open-ports", help="Let --host be reached from other machines, without any key.")
    ] = False,
    allow_no_keys: Annotated[
        bool, typer.Option("--allow-no-keys", help="Let --gateway-host be reached from other machines without keys.")
    ] = False,
    exit_timeout: Annotated[int, typer.Option(min=0, help="Seconds for streams in flight at the end.")] = 30,
    verbose: Annotated[bool, typer.Option(help="Have tritonserver log every request.")] = False,
    give_up_after: Annotated[
        int, typer.Option(min=1, help="Starts of a dead process that are no use before it is given up.")
    ] = GIVE_UP_AFTER,
) -> None:
    """Run the server of a home in the foreground, or take over the one that runs; SIGINT and SIGTERM end it in order.

    The server goes on where this process is killed. The next `piccard serve` takes it over without a restart.
    """
    from piccard.exposure import check_exposure
    from piccard.restarts import run_again
    from piccard.server_settings import ServerSettings
    from piccard.supervisor import Supervisor, print_line

    settings = ServerSettings(
        host,
        http_port,
        grpc_port,
        metrics_port,
        health_port,
        exit_timeout,
        verbose,
        give_up_after,
        gateway_host,
        gateway_port if gateway else None,
    )
    check_exposure(home, settings, open_ports=allow_open_ports, no_keys=allow_no_keys)
    raise typer.Exit(run_again(lambda: Supervisor(home, settings, print_line), print_line))


@key_app.command("add")
def key_add(
    name: Annotated[str, typer.Argument(help="Whose it is, for people.")],
    tenant: Annotated[str, typer.Option(help="Whose prompts share a cache; else the name.")] = "",
    rate: Annotated[float | None, typer.Option(min=0.001, help="Requests a minute; else any number.")] = None,
    priority: Annotated[
        int,
        typer.Option(min=-100, max=100, help="Of its requests, and the best that they may ask for; lower goes first."),
    ] = 0,
    service: Annotated[list[str] | None, typer.Option("--service", help="One that it may ask; else all.")] = None,
    home: Home = DEFAULT_HOME,
) -> None:
    """Make a key and print it, once. From the first key on, nobody comes in without one."""
    from piccard.gateway_keys import add_key

    typer.echo(add_key(home, name, tenant=tenant or name, rate=rate, priority=priority, services=service or None))


@key_app.command("list")
def key_list(home: Home = DEFAULT_HOME) -> None:
    """Print one JSON line a key, without what opens the door."""
    from piccard.gateway_keys import list_keys

    for record in list_keys(home):
        typer.echo(json.dumps(record, ensure_ascii=False))


@key_app.command("revoke")
def key_revoke(
    id: Annotated[str, typer.Argument(help="The part after pk-, as `key list` tells it.")], home: Home = DEFAULT_HOME
) -> None:
    """Have a key open nothing any more, from the next request on."""
    from piccard.gateway_keys import revoke_key

    typer.echo(revoke_key(home, id))


@app.command()
def publish(
    checkpoint: Annotated[
        Path, typer.Argument(parser=file_path, metavar="CHECKPOINT", help="Folder of a Hugging Face checkpoint.")
    ],
    label: Annotated[str | None, typer.Option(help="A name for people, such as v1.2.0.")] = None,
    profile: Annotated[str, typer.Option(help="Engine settings: balanced, latency or throughput.")] = "balanced",
    precision: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    memory: Annotated[str | None, typer.Option(help="Share of the device's memory (0.4) or amount (8GiB).")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, max=2**31 - 1, help="Context in tokens; else the checkpoint's.")
    ] = None,
    batch_invariant: Annotated[
        bool, typer.Option(help="On a GPU: the same bits for a request whatever runs beside it, in slower steps.")
    ] = False,
    runner: Annotated[str, typer.Option(help="torch, onnxruntime or scripted.")] = "torch",
    ops_library: Annotated[
        Path | None,
        typer.Option(
            parser=file_path, metavar="FILE", help="Custom-op library of runner onnxruntime; else ours is built."
        ),
    ] = None,
    quantize: Annotated[
        Literal["int4"] | None, typer.Option(help="Pack products and experts of the export, for runner onnxruntime.")
    ] = None,
    linked: Annotated[bool, typer.Option(help="Run the installed engine instead of a snapshot of it.")] = False,
    hash_weights: Annotated[bool, typer.Option(help="Read all weights for their hash.")] = True,
    service: ServiceName = DEFAULT_SERVICE,
    home: Home = DEFAULT_HOME,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Publish a checkpoint as a new version; a running server loads and probes it.

    A version is code. The server runs its engine, and the checkpoint's files and chat template decide what that does
    and what clients see: publish nothing that you would not run.
    """
    from piccard.publish import Publication
    from piccard.publish import publish as run

    settings = {
        "profile": profile,
        "precision": precision,
        "device": device,
        "memory": _memory(memory),
        "max_model_len": max_model_len,
        "batch_invariant": batch_invariant,
        "runner": runner,
        "ops_library": None if ops_library is None else str(ops_library.absolute()),
        "linked": linked,
    }
    with begin_operation(home, service, dry_run) as op:
        show(run(op, Publication(checkpoint, label, settings, hash_weights, quantize == "int4")), as_json=as_json)


@app.command()
def promote(
    version: VersionNumber,
    service: ServiceName = DEFAULT_SERVICE,
    home: Home = DEFAULT_HOME,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Make a version stable; new requests follow at once, running streams stay where they are."""
    from piccard.promote import promote as run

    with begin_operation(home, service, dry_run) as op:
        show(run(op, version), as_json=as_json)


@app.command()
def rollback(
    service: ServiceName = DEFAULT_SERVICE,
    home: Home = DEFAULT_HOME,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Make the previous version stable again."""
    from piccard.rollback import rollback as run

    with begin_operation(home, service, dry_run) as op:
        show(run(op), as_json=as_json)


@app.command()
def retire(
    version: VersionNumber,
    force: Annotated[bool, typer.Option("--force", help="The previous version too, within its bake time.")] = False,
    wait: Annotated[
        float, typer.Option(parser=finite_seconds, metavar="SECONDS", help="Seconds to wait for its streams.")
    ] = 30.0,
    service: ServiceName = DEFAULT_SERVICE,
    home: Home = DEFAULT_HOME,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Unload a version after its last stream."""
    from piccard.retire import retire as run

    with begin_operation(home, service, dry_run) as op:
        show(run(op, version, force=force, wait=wait), as_json=as_json)


@app.command()
def revive(
    process: Annotated[
        str | None, typer.Argument(help="version-N, admission, router or router_unary; else all that are dead.")
    ] = None,
    service: ServiceName = DEFAULT_SERVICE,
    home: Home = DEFAULT_HOME,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Start dead processes again that were given up, or that no `piccard serve` looks after."""
    from piccard.revive import revive as run

    with begin_operation(home, service, dry_run) as op:
        show(run(op, process), as_json=as_json)


@app.command()
def roll(
    processes: Annotated[
        list[str] | None, typer.Argument(help="router, router_unary or admission; else those whose code differs.")
    ] = None,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for what is left of an earlier roll.")] = 30.0,
    service: ServiceName = DEFAULT_SERVICE,
    home: Home = DEFAULT_HOME,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Have admission and routers run the installed code, after an upgrade, without losing a request."""
    from piccard.roll import roll as run

    with begin_operation(home, service, dry_run) as op:
        show(run(op, processes or [], wait=wait), as_json=as_json)


@canary_app.command("set")
def canary_set(
    version: Annotated[int, typer.Option("--version", parser=version_number, metavar="VERSION", help="Its number.")],
    ratio: Annotated[float, typer.Option("--ratio", help="Share of the traffic, 0 to 1.")],
    service: ServiceName = DEFAULT_SERVICE,
    home: Home = DEFAULT_HOME,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Send a share of the traffic to a version."""
    from piccard.canary import canary_set as run

    with begin_operation(home, service, dry_run) as op:
        show(run(op, version, ratio), as_json=as_json)


@canary_app.command("off")
def canary_off(
    service: ServiceName = DEFAULT_SERVICE,
    home: Home = DEFAULT_HOME,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Send no traffic to a canary any more; its version stays loaded."""
    from piccard.canary import canary_off as run

    with begin_operation(home, service, dry_run) as op:
        show(run(op), as_json=as_json)


@app.command()
def status(
    service: ServiceName = DEFAULT_SERVICE,
    home: Home = DEFAULT_HOME,
    verbose: Annotated[bool, typer.Option("--verbose", help="Also what serves the operators of each version.")] = False,
    as_json: AsJson = False,
) -> None:
    """Versions, their processes and the policy."""
    from piccard.status import status as run

    # It changes nothing, so it waits for nobody.
    with begin_operation(home, service, dry_run=True, must_answer=False) as op:
        found = run(op, verbose=verbose)
    if as_json:
        typer.echo(json.dumps(found, ensure_ascii=False))
        return
    from rich.console import Console

    from piccard.operator_table import print_operators
    from piccard.status_table import print_status

    console = Console()
    # Into a pipe nothing needs to fit a screen.
    console = console if console.is_terminal else Console(width=160)
    print_status(found, console)
    print_operators(found, console)


@app.command()
def doctor(
    repair: Annotated[bool, typer.Option("--repair", help="Mend what can be mended.")] = False,
    service: ServiceName = DEFAULT_SERVICE,
    home: Home = DEFAULT_HOME,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Look for every known trap in a home; exit code 1 where one is left."""
    from piccard.doctor import doctor as run
    from piccard.doctor import notes, outcome_of

    with begin_operation(home, service, dry_run or not repair) as op:
        found, repaired = run(op, repair=repair)
        told = list(notes(op))
        outcome = outcome_of(op, found, repaired, told)
    if as_json:
        typer.echo(json.dumps(outcome.as_json(), ensure_ascii=False))
    else:
        for finding in repaired:
            typer.echo(f"repaired  {finding.trap}: {finding.problem}")
        for finding in found:
            typer.echo(f"found     {finding.trap}: {finding.problem}\n          {finding.remedy}")
        for note in told:
            typer.echo(f"note      {note}")
        typer.echo(outcome.message)
    if found:
        raise typer.Exit(1)


@app.command()
def generate(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(parser=file_path, metavar="CHECKPOINT", help="Folder of a checkpoint; else the demo's."),
    ] = None,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The text to go on from.")] = "def fibonacci(n):",
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user's message.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    top_p: Annotated[float | None, typer.Option()] = None,
    seed: Annotated[int | None, typer.Option()] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends the text; may be repeated.")] = None,
    profile: Annotated[str, typer.Option()] = "latency",
    precision: Annotated[str, typer.Option()] = "auto",
    device: Annotated[str, typer.Option()] = "auto",
    as_json: AsJson = False,
) -> None:
    """Run a checkpoint without a server; the text streams to standard output."""
    from piccard.generate_command import run

    given = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed, "stop": stop}
    settings = {"profile": profile, "precision": precision, "device": device}
    run(checkpoint, prompt, chat=chat, sampling=given, settings=settings, as_json=as_json)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a Hugging Face checkpoint.")],
    out: Annotated[Path, typer.Argument(help="The folder to make.")],
    quantize: Annotated[
        Literal["int4"] | None, typer.Option(help="Pack products and experts; else weights keep their type.")
    ] = None,
    precision: Annotated[
        Literal["float32", "bfloat16", "float16"],
        typer.Option(help="Of activations and cache: float32 for a CPU, the others for a GPU."),
    ] = "float32",
) -> None:
    """Write a checkpoint as an ONNX model over the com.deepseek operators."""
    import torch
    from deepseek_engine.models import CheckpointError
    from deepseek_ops.exporter.export import ExportError
    from deepseek_ops.exporter.export import export as run
    from deepseek_ops.exporter.weight_format import Int4Format

    try:
        packed = Int4Format() if quantize == "int4" else None
        dtype: torch.dtype = getattr(torch, precision)
        told = run(checkpoint, out, lambda part: typer.echo(part, err=True), format=packed, precision=dtype)
        typer.echo(told)
    except (CheckpointError, ExportError) as error:
        raise OperationError(str(error)) from error


def _memory(value: str | None) -> float | str | None:
    try:
        return None if value is None else float(value)
    except ValueError:
        return value
