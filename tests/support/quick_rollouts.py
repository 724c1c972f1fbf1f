"""Rollouts of a real server that are over in seconds."""

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from entry_points import ENTRY_POINTS
from piccard.rollout.commands import status
from piccard_canary.rollout.plan import NEVER, default_metrics
from piccard_server import RunningServer, wait_for

# Machines that run tests are slow for their own reasons: latencies fail nobody here.
_CHANGES: dict[str, dict[str, float]] = {"proportion": {"margin": 0.3}, "logprob": {}}
_RULES = {
    name: rule.model_copy(update=_CHANGES.get(rule.kind, {"least": 1000.0, "proved_from": NEVER})).model_dump()
    for name, rule in default_metrics().items()
}
PLAN = {
    "steps": [0.4, 0.6, 1.0],
    "interval": 1.0,
    "look": 0.5,
    "min_samples": 20,
    "hysteresis": 1,
    "hold": 1000,
    "bake": 1.0,
    "metrics": _RULES,
}


def begin(server: RunningServer, folder: Path, **changes: Any) -> None:
    """Start a rollout of version 2 by `PLAN` with `changes`; its file goes into `folder`."""
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(PLAN | changes))
    server.piccard("rollout", "start", "--version=2", f"--plan={path}")


def rollout(server: RunningServer) -> dict[str, Any]:
    return status(server.service)


def wait_phase(server: RunningServer, *phases: str, timeout: float = 60.0) -> dict[str, Any]:
    """The rollout once it is in one of `phases`."""

    def look() -> dict[str, Any] | None:
        told = rollout(server)
        return told if told["phase"] in phases else None

    return wait_for(look, timeout, f"the rollout to be {' or '.join(phases)}; it is {rollout(server)}")


def traffic_of(server: RunningServer) -> tuple[int | None, float]:
    """The canary and its share, as policy.yaml has them."""
    found = yaml.safe_load(server.service.policy_file.read_text())
    return found["canary"], found["traffic_ratio"]


@contextmanager
def traffic(
    server: RunningServer,
    script: dict[str, Any],
    canary: dict[str, Any],
    *,
    clients: int = 4,
    entry: str = "generate",
    pause: float = 0.0,
    **inputs: Any,
) -> Iterator[list[str]]:
    """Clients that send one request after the other until the end of the context; their codes.

    Args:
        script: what every version plays, but for version 2 what `canary` says of it.
        pause: seconds between two requests of a client at most; each is drawn by lot, and short ones are likelier.
        inputs: beside text and script.
    """
    over = threading.Event()
    codes: list[str] = []
    inputs |= {"text_input": "a b c", "extensions": {"script": script | {"versions": {"2": canary}}}}

    def send(seed: int) -> None:
        draw = random.Random(seed)
        while not over.wait(pause * draw.random() ** 2):
            codes.append(ENTRY_POINTS[entry](server, {}, {}, inputs).code)

    with ThreadPoolExecutor(clients) as pool:
        running = [pool.submit(send, seed) for seed in range(clients)]
        try:
            yield codes
        finally:
            over.set()
        for client in running:
            client.result(60)
