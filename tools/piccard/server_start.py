"""Makes a home ready for a server, and the server ready for the home."""

import os
import signal
from contextlib import suppress
from pathlib import Path

from piccard_contract.home import Service

from piccard.found_server import leftover_stubs
from piccard.keys import admin_key_path, make_secret, read_secret
from piccard.pin import set_pin
from piccard.policy_store import load_policy
from piccard.repository import compile_models
from piccard.server_log import put_aside, server_log
from piccard.server_process import ServerProcess
from piccard.server_settings import ServerSettings, header_pattern, server_arguments
from piccard.shared_memory import dead_regions, remove_regions, server_prefix
from piccard.triton_binary import TritonInstall, prepare_backends, server_environment


def make_server(home: Path, services: list[Service], settings: ServerSettings, install: TritonInstall) -> ServerProcess:
    """Set pins, keys and folders of a home right and give the server that is to be started.

    No server of the home may run; what a dead one left is ended and removed.
    """
    folder = home / "server"
    working = folder / "empty"
    working.mkdir(parents=True, exist_ok=True)
    for stub in leftover_stubs(home):
        with suppress(ProcessLookupError):
            os.kill(stub, signal.SIGKILL)
    remove_regions(dead_regions(home))
    names: set[str] = set()
    for service in services:
        compile_models(service)
        for model in service.models:
            set_pin(service.repository / model)
        policy = load_policy(service)
        names |= {policy.header, *policy.sticky_keys}
    make_secret(services[0].gateway_secret)
    prefix = server_prefix(home, os.getpid())
    arguments = server_arguments(
        settings,
        services,
        repository=home / "model_repository",
        backends=prepare_backends(install, folder),
        region_prefix=prefix,
        admin_key=read_secret(admin_key_path(home)),
        headers=header_pattern(names),
    )
    log = server_log(home)
    put_aside(log)
    return ServerProcess([str(install.binary), *arguments], server_environment(install), working, log, prefix)
