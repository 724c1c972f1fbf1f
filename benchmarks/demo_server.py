"""A server of the demo checkpoint for the time of a benchmark."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from piccard_server import RunningServer

STARTUP = 180.0


@contextmanager
def demo_server() -> Iterator[str]:
    """Make a home, run `piccard serve` over it on free ports of 127.0.0.1, and end it afterwards.

    Yields:
        The gRPC address, once both shipped versions are loaded.
    """
    with tempfile.TemporaryDirectory(prefix="piccard-bench-") as folder:
        home = Path(folder) / "home"
        subprocess.run([sys.executable, "-m", "piccard", "init", str(home)], check=True, stdout=subprocess.DEVNULL)
        server = RunningServer(home, threads=None)
        try:
            server.wait_ready(STARTUP)
            yield server.grpc
        finally:
            server.stop()
