"""Uses a server for long and looks whether anything grows: publish/retire cycles first, then requests.

Every tenth request is cancelled: by token and by disconnect, over gRPC and /generate_stream, and on a version itself.
Sampled by process are resident memory, threads and descriptors, and of the home and the machine processes, shared
memory, files, disk, state.json, sections and metrics. What counts as growth is in tests/support/growth.py: the first
tenth is left out, a line is laid through the rest, and its rise is compared with what such a series may rise by.

Prints a table for each part, keeps it in results/leaks.json with the samples, and exits 1 where something grew.

    python benchmarks/leaks.py --cycles 500 --requests 20000
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from footprint import Footprint
from growth import PER_CYCLE, PER_REQUEST, Growth, growths, table
from leak_run import Samples, Tell, sampled_cycles, sampled_requests
from piccard_server import RunningServer, make_scripted_home

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=500)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--samples", type=int, default=50, help="of each part")
    args = parser.parse_args()
    results = json.loads((RESULTS / "leaks.json").read_text()) if (RESULTS / "leaks.json").exists() else {}
    grew: list[str] = []
    with tempfile.TemporaryDirectory(prefix="piccard-bench-") as folder:
        server = RunningServer(make_scripted_home(Path(folder) / "home").home)
        try:
            server.wait_ready()
            for part, count, use, each in (
                ("cycles", args.cycles, sampled_cycles, PER_CYCLE),
                ("requests", args.requests, sampled_requests, PER_REQUEST),
            ):
                if not count:
                    continue
                started = time.monotonic()
                samples: Samples = []
                ended_by: str | None = None
                try:
                    use(server, count, max(1, count // args.samples), _progress(part, started, samples))
                except BaseException as error:
                    ended_by = f"{type(error).__name__}: {error}"
                    raise
                finally:
                    # What was seen until something failed tells as much about leaks.
                    ended = {"wanted": count, "ended_by": ended_by, "seconds": round(time.monotonic() - started)}
                    results[part] = _summary(growths(samples, each), samples, ended)
                    RESULTS.mkdir(exist_ok=True)
                    (RESULTS / "leaks.json").write_text(json.dumps(results, indent=1) + "\n")
                grew += [f"{part}: {item['name']}" for item in results[part]["series"] if item["grew"]]
        finally:
            server.stop()
    print("\n".join(f"grew: {name}" for name in grew) or "nothing grew")
    return 1 if grew else 0


def _progress(part: str, started: float, samples: Samples) -> Tell:
    def tell(at: int, sample: Footprint) -> None:
        samples.append((at, sample))
        memory = sample["resident MiB of tritonserver"]
        print(f"{time.monotonic() - started:8.0f} s  {part} {at}, tritonserver {memory:.1f} MiB", flush=True)

    return tell


def _summary(found: list[Growth], samples: Samples, ended: dict[str, Any]) -> dict[str, Any]:
    """A part as it is kept, with how many uses were wanted and the error that ended it before those, or null."""
    print(table(found), flush=True)
    return {
        "count": samples[-1][0] if samples else 0,
        **ended,
        "series": [asdict(item) | {"rise": item.rise, "grew": item.grew} for item in found],
        "samples": [{"at": at, **{name: round(value, 3) for name, value in sample.items()}} for at, sample in samples],
    }


if __name__ == "__main__":
    sys.exit(main())
