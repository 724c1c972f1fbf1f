"""The command line of `piccard rollout`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from piccard_contract.home import Service

from piccard.arguments import file_path, version_number
from piccard.errors import OperationError
from piccard.options import (
    DEFAULT_HOME,
    DEFAULT_SERVICE,
    AsJson,
    DryRun,
    Home,
    ServiceName,
    begin_operation,
    show,
)
from piccard.outcome import Outcome

rollout_app = typer.Typer(no_args_is_help=True, help="Give a version more and more traffic, as long as it is no worse.")

PlanFile = Annotated[
    Path | None, typer.Option("--plan", parser=file_path, metavar="FILE", help="YAML; docs/rollout.md has its keys.")
]
Steps = Annotated[str | None, typer.Option("--steps", help="Shares of the traffic, such as 0.01,0.05,0.25,0.5,1.")]
Interval = Annotated[float | None, typer.Option("--interval", help="Seconds that each step is watched at least.")]


@rollout_app.command()
def start(
    version: Annotated[int, typer.Option("--version", parser=version_number, metavar="VERSION", help="Its number.")],
    plan: PlanFile = None,
    steps: Steps = None,
    interval: Interval = None,
    min_samples: Annotated[int | None, typer.Option(help="Requests that each step needs to pass.")] = None,
    gates: Annotated[str | None, typer.Option(help="Steps that wait for `approve`, such as 0.5,1.")] = None,
    bake: Annotated[
        float | None, typer.Option(help="Seconds after the promotion in which a failure rolls back.")
    ] = None,
    retire_old: Annotated[bool, typer.Option("--retire-old", help="Retire the old version after that.")] = False,
    service: ServiceName = DEFAULT_SERVICE,
    home: Home = DEFAULT_HOME,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Begin a rollout of a version that is loaded; `piccard serve` runs it."""
    from piccard.rollout.commands import start as run
    from piccard.rollout.plan_file import read_plan, shares

    wanted = read_plan(
        plan,
        {
            "steps": shares(steps),
            "interval": interval,
            "min_samples": min_samples,
            "gates": shares(gates),
            "bake": bake,
            "retire_old": retire_old or None,
        },
    )
    with begin_operation(home, service, dry_run) as op:
        show(run(op, version, wanted), as_json=as_json)


@rollout_app.command()
def status(service: ServiceName = DEFAULT_SERVICE, home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """The rollout that is under way, or the last one, with the figures of its last look."""
    from piccard.rollout.commands import status as run
    from piccard.rollout.told import lines

    found = run(_service(home, service))
    if as_json:
        typer.echo(json.dumps(found, ensure_ascii=False))
        return
    for line in lines(found):
        typer.echo(line)


@rollout_app.command()
def pause(service: ServiceName = DEFAULT_SERVICE, home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Begin no further step; a canary that fails is aborted all the same."""
    from piccard.rollout.commands import pause as run

    _say(run, home, service, as_json=as_json)


@rollout_app.command()
def resume(service: ServiceName = DEFAULT_SERVICE, home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Go on with a paused rollout: its step is watched anew."""
    from piccard.rollout.commands import resume as run

    _say(run, home, service, as_json=as_json)


@rollout_app.command()
def approve(service: ServiceName = DEFAULT_SERVICE, home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Begin the next step of a rollout that waits at a gate, or that could not be judged."""
    from piccard.rollout.commands import approve as run

    _say(run, home, service, as_json=as_json)


@rollout_app.command()
def abort(
    reason: Annotated[str, typer.Option(help="Kept with the rollout.")] = "aborted by a person",
    service: ServiceName = DEFAULT_SERVICE,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Take the canary's traffic away at once and end the rollout."""
    from piccard.rollout.commands import abort as run

    _say(lambda found: run(found, reason), home, service, as_json=as_json)


@rollout_app.command("run")
def run_alone(home: Home = DEFAULT_HOME) -> None:
    """Run the rollouts of a home in the foreground, where no `piccard serve` does."""
    import threading

    from piccard.end_signals import EndSignals
    from piccard.rollout.keeper import Keeper
    from piccard.state_store import services_of
    from piccard.supervisor import print_line

    if not services_of(home):
        raise OperationError(f"{home} is no home; run `piccard init {home}`")
    ending = threading.Event()
    with EndSignals(ending.set):
        Keeper(lambda: services_of(home.absolute()), print_line, ending).run()


@rollout_app.command()
def simulate(
    plan: PlanFile = None,
    steps: Steps = None,
    interval: Interval = None,
    rate: Annotated[float, typer.Option(min=0.1, help="Requests a second.")] = 50.0,
    errors: Annotated[float, typer.Option(min=0, max=1, help="Share of requests that fail in either version.")] = 0.001,
    runs: Annotated[int, typer.Option(min=1, help="Rollouts of each scenario.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Of the first one.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Try a plan on synthetic traffic: what it would catch, when, and how often it would abort an equal version."""
    from piccard.rollout.plan_file import read_plan, shares
    from piccard.rollout.simulator import run, standard_scenarios, summary
    from piccard.rollout.told import summary_line

    wanted = read_plan(plan, {"steps": shares(steps), "interval": interval})
    results = {}
    for scenario in standard_scenarios(wanted, errors, rate):
        found = summary(scenario, [run(scenario, seed + number) for number in range(runs)])
        results[scenario.name] = found
        if not as_json:
            typer.echo(summary_line(scenario.name, found))
    if as_json:
        typer.echo(json.dumps(results, ensure_ascii=False))


def _service(home: Path, name: str) -> Service:
    from piccard.state_store import services_of

    found = [service for service in services_of(home.absolute()) if service.name == name]
    if not found:
        raise OperationError(f"{home} holds no service {name!a}; run `piccard init {home}`")
    return found[0]


def _say(run: Callable[[Service], Outcome], home: Path, service: str, *, as_json: bool) -> None:
    show(run(_service(home, service)), as_json=as_json)
