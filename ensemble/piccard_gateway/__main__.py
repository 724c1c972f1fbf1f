"""The gateway's process; `piccard serve` starts it.

python -m piccard_gateway --home HOME --grpc 127.0.0.1:8001 --host 127.0.0.1 --port 8004 --exit-timeout 30
"""

import argparse
import asyncio
import logging
import signal
from pathlib import Path

import uvicorn
from piccard_contract.home import Service
from piccard_contract.process_lock import ProcessLock
from starlette.types import ASGIApp

from piccard_gateway.app import make_app
from piccard_gateway.catalogue import Catalogue
from piccard_gateway.deadlines import FirstTokenDeadlines, TimedGenerator
from piccard_gateway.fill_in_middle import GapTokens
from piccard_gateway.gateway import Gateway
from piccard_gateway.key_ring import KeyRing
from piccard_gateway.protocol import bounded_protocol
from piccard_gateway.settings_file import SettingsFile
from piccard_gateway.triton_generator import TritonGenerator

# Connections that wait to be accepted, and connections at once.
_BACKLOG = 512
_CONNECTIONS = 4096

# Seconds for what is told to clients whose requests the end cuts short.
_LAST_WORDS = 2.0

# Seconds for which a connection without a request is kept: longer than clients do (httpx: 5), so that they close first
# and none sends a request into a closed one.
_KEEP_ALIVE = 30


def main() -> None:
    """Serve until SIGTERM, then let streams in flight end."""
    arguments = _arguments()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    place = Service(arguments.home)
    lock = ProcessLock(place.gateway_lock)
    # The gateway of a supervisor that was killed lets go once its streams have ended.
    lock.acquire(timeout=arguments.exit_timeout + 15.0)
    try:
        asyncio.run(_serve(arguments, place))
    finally:
        lock.release()


async def _serve(arguments: argparse.Namespace, place: Service) -> None:
    settings = SettingsFile(place.gateway_file)
    triton = TritonGenerator(arguments.grpc)
    deadlines = FirstTokenDeadlines(lambda: settings.current().deadlines)
    gateway = Gateway(
        generator=TimedGenerator(triton, deadlines),
        catalogue=Catalogue(arguments.home),
        settings=settings,
        deadlines=deadlines,
        gaps=GapTokens(),
        secret=place.gateway_secret.read_bytes().strip(),
    )
    server = uvicorn.Server(_config(arguments, make_app(gateway, KeyRing(place.gateway_keys)), settings))
    for number in (signal.SIGINT, signal.SIGTERM):
        # uvicorn takes them while it serves, and sends them again at its end, when there is still something to tell.
        signal.signal(number, lambda *_: None)
    await server.serve()
    if server.server_state.tasks:
        # It has waited for these long enough, and they tell their clients that it ends.
        await asyncio.wait(server.server_state.tasks, timeout=_LAST_WORDS)
    await triton.close()


def _config(arguments: argparse.Namespace, app: ASGIApp, settings: SettingsFile) -> uvicorn.Config:
    limits = settings.current().limits
    return uvicorn.Config(
        app,
        host=arguments.host,
        port=arguments.port,
        http=bounded_protocol(limits.header_bytes, limits.read_seconds),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE,
        limit_concurrency=_CONNECTIONS,
        timeout_graceful_shutdown=arguments.exit_timeout,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="piccard_gateway", description="OpenAI-compatible front door of a home.")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--grpc", required=True, help="host:port of tritonserver's gRPC")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--exit-timeout", type=int, default=30, help="seconds for streams in flight at the end")
    return parser.parse_args()


if __name__ == "__main__":
    main()
