"""A server of the demo checkpoint for the time of a benchmark."""

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STARTUP = 180.0


@contextmanager
def demo_server() -> Iterator[str]:
    """Make a home, run `piccard serve` over it on free ports of 127.0.0.1, and end it afterwards.

    Yields:
        The gRPC address, once both shipped versions are loaded.
    """
    with tempfile.TemporaryDirectory(prefix="piccard-bench-") as folder:
        home = Path(folder) / "home"
        piccard = [sys.executable, "-m", "piccard"]
        subprocess.run([*piccard, "init", str(home)], check=True, stdout=subprocess.DEVNULL)
        names = ("http", "grpc", "metrics", "health")
        ports = dict(zip(names, _free_ports(len(names)), strict=True))
        options = [f"--{name}-port={port}" for name, port in ports.items()]
        server = subprocess.Popen([*piccard, "serve", f"--home={home}", *options], stdout=subprocess.DEVNULL)
        try:
            _wait(server, f"http://127.0.0.1:{ports['health']}/livez")
            yield f"127.0.0.1:{ports['grpc']}"
        finally:
            server.terminate()
            server.wait(60)


def _wait(server: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + STARTUP
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SystemExit(f"piccard serve ended with {server.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if json.load(answer)["phase"] == "serving":
                    return
        except (urllib.error.URLError, TimeoutError):
            pass
        time.sleep(0.2)
    raise SystemExit(f"the server was not ready after {STARTUP:g} s")


def _free_ports(count: int) -> list[int]:
    opened = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [item.getsockname()[1] for item in opened]
    for item in opened:
        item.close()
    return ports
