"""How well rollouts tell a worse canary from an equal one: whole rollouts over synthetic traffic, 1,000 a scenario.

The verdicts and the course are those of `piccard rollout`. Traffic is 50 requests a second whose rate wanders, and
latencies grow with the load of each version; base error rates are 0.1 % (steps of 4 minutes) and 1 % (10 minutes).
Prints a line a scenario and keeps all in results/rollout.json. `--only` runs the scenarios whose names hold a text, and
keeps the results of the others.

    python benchmarks/rollout.py --runs 1000
    python benchmarks/rollout.py --runs 1000 --only "token gap +20 %, base 1 %"
"""

import argparse
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from piccard.rollout.simulator import Scenario, described, run, standard_scenarios, summary
from piccard.rollout.synthetic import Behaviour, Scene, Traffic
from piccard_canary.rollout.plan import Plan

RESULTS = Path(__file__).parent / "results"

_WITHOUT = "token gap of an equal canary over stable's, without strata"

# Base error rate -> seconds of a step.
BASES = {0.001: 240.0, 0.01: 600.0}


def measured(scenario: Scenario, runs: int, pool: ProcessPoolExecutor) -> dict[str, Any]:
    """The summary of `runs` rollouts, with seeds 0 and on."""
    began = time.perf_counter()
    found = list(pool.map(partial(run, scenario), range(runs), chunksize=10))
    seconds = time.perf_counter() - began
    return {**summary(scenario, found), **described(scenario), "simulated_in_seconds": round(seconds, 1)}


def without_strata(share: float, runs: int) -> float:
    """What a comparison of all requests says of an equal canary: median token gap over that of stable, mean of runs."""
    ratios = []
    for seed in range(runs):
        scene = Scene(Traffic(), Behaviour(), Behaviour(), seed)
        scene.run(60, 0.0)
        canary, stable = scene.run(240, share)
        ratios.append(float(np.median(canary.token_gap) / np.median(stable.token_gap)))
    return sum(ratios) / len(ratios)


def plan_for(interval: float) -> Plan:
    """The default plan with steps of this length; a bake time of one step, and eight looks a step."""
    return Plan(interval=interval, look=interval / 8, bake=interval)


def keep(results: dict[str, Any]) -> None:
    """Write what there is so far: a run that is ended loses one scenario."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "rollout.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def kept() -> dict[str, Any]:
    """What was written before."""
    found: dict[str, Any] = json.loads((RESULTS / "rollout.json").read_text(encoding="utf-8"))
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--runs", type=int, default=1000)
    arguments.add_argument("--processes", type=int, default=os.cpu_count())
    arguments.add_argument("--only", default="", metavar="TEXT")
    given = arguments.parse_args()
    results = kept() if given.only else {}
    if given.only in _WITHOUT:
        results[_WITHOUT] = {f"{100 * share:g} %": round(without_strata(share, 20), 3) for share in (0.05, 0.25, 0.5)}
        keep(results)
    with ProcessPoolExecutor(given.processes) as pool:
        for base, interval in BASES.items():
            for scenario in standard_scenarios(plan_for(interval), base):
                name = f"{scenario.name}, base {100 * base:g} %"
                if given.only not in name:
                    continue
                results[name] = found = measured(scenario, given.runs, pool)
                ends = {key: found[key] for key in ("promoted", "aborted", "rolled_back", "waits_for_a_person")}
                print(
                    name, ends, f"caught {found.get('caught', '-')}", f"{found['simulated_in_seconds']} s", flush=True
                )
                keep(results)


if __name__ == "__main__":
    main()
