"""A soak of five minutes at full load, 5 % of it abnormal: is anything lost, does anything grow, is it ready then?

Locust sends streams to the ensemble over gRPC and to the gateway over SSE, on the demo checkpoint, from `--users`
clients that never pause, which is more than the machine serves at once. Every twentieth request is one that no client
should send, of five kinds in turn: over-long prompts and bodies, control characters, broken UTF-8, half-open
connections, and cancels, by token and by going away (tests/support/soak_requests.py).

Every normal request has to end whole, with each of its tokens, or with a code of the closed list; past the warm-up
neither memory, threads, descriptors nor shared memory may grow (tests/support/growth.py); in the end nothing runs, no
block of a cache is held, no process is another than before, and the service is ready.

Prints a table, keeps it in results/soak.json with the samples, and exits 1 where anything was wrong.

    python benchmarks/soak.py --seconds 300 --warm-up 60 --users 24
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from growth import table
from piccard_server import RunningServer, wait_for
from short_calls import answers_gateway
from soak_run import soak

RESULTS = Path(__file__).parent / "results"
STARTUP = 180.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0, help="of load")
    parser.add_argument("--warm-up", type=float, default=60.0, help="seconds of it that do not count for growth")
    parser.add_argument("--users", type=int, default=24, help="requests at once")
    args = parser.parse_args()
    machine: dict[str, object] = {"cpus": os.cpu_count(), "load_average_before": os.getloadavg()}
    with tempfile.TemporaryDirectory(prefix="piccard-bench-") as folder:
        home = Path(folder) / "home"
        subprocess.run([sys.executable, "-m", "piccard", "init", str(home)], check=True, stdout=subprocess.DEVNULL)
        server = RunningServer(home, "--gateway", threads=None)
        try:
            server.wait_ready(STARTUP)
            wait_for(lambda: answers_gateway(server), 60, "the gateway")
            found = soak(server, **vars(args), tell=lambda line: print(line, flush=True))
        finally:
            server.stop()
    grown = found.growths()
    found.wrong += [f"grew: {item.name}, by {item.rise:.2f}" for item in grown if item.grew]
    print(table(grown))
    for name, entry in found.load["requests"].items():
        outcomes = ", ".join(f"{outcome} {count}" for outcome, count in entry["outcomes"].items())
        print(f"{entry['kind']:8} {name:20} {entry['requests']:6}: {outcomes}")
    print("\n".join(found.wrong) or "nothing was lost, nothing grew, ready at the end")
    machine["load_average_after"] = os.getloadavg()
    RESULTS.mkdir(exist_ok=True)
    result = {"settings": vars(args), "machine": machine, **found.as_json()}
    (RESULTS / "soak.json").write_text(json.dumps(result, indent=1) + "\n")
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
