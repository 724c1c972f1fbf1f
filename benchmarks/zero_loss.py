"""The test of tests/server/test_zero_loss.py at any size: requests while two operators change versions.

Prints what came of it, keeps it in results/zero_loss.json, and exits 1 where a request was lost, cut short or answered
wrongly, where a process was started that nobody published, or where anything disagrees afterwards.

    python benchmarks/zero_loss.py --streams 16 --unary 4 --requests 2000 --cycles 20 --publications 5
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from piccard_server import RunningServer, make_scripted_home
from zero_loss import audited, disagreements, run_without_loss

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16, help="at once, over gRPC and /generate_stream")
    parser.add_argument("--unary", type=int, default=4, help="requests at once for a single answer")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--cycles", type=int, default=20, help="of promote and rollback")
    parser.add_argument("--publications", type=int, default=5, help="each retired again")
    settings = vars(parser.parse_args())
    with tempfile.TemporaryDirectory(prefix="piccard-bench-") as folder:
        server = RunningServer(make_scripted_home(Path(folder) / "home", traffic_ratio=0.1).home)
        try:
            server.wait_ready()
            outcome = run_without_loss(server, **settings)
            wrong = outcome.faults + disagreements(server)
            commands = dict(audited(server))
        finally:
            server.stop()
    started = sum(outcome.initialisations.values())
    if started != outcome.publications + outcome.revivals:
        wrong.append(f"{started} processes for {outcome.publications} publications and {outcome.revivals} revivals")
    result = {"settings": settings, **outcome.as_json(), "commands": commands, "wrong": wrong}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "zero_loss.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    print(f"{outcome.total} requests in {outcome.seconds:g} s, {len(wrong)} faults")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
