"""Where and how a server listens."""

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from piccard_contract.home import Service
from piccard_contract.request import FORWARDED_HEADERS

from piccard.revival import GIVE_UP_AFTER

ADMIN_KEY_NAME = "admin-key"
RESTRICTED = "model-repository,shared-memory,trace,logging"
REGION_PREFIX_OPTION = "--backend-config=python,shm-region-prefix-name"


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Addresses and limits of one server.

    Attributes:
        host: the address that everything listens on.
        http_port, grpc_port, metrics_port: tritonserver's.
        health_port: the supervisor's, for /livez and /readyz.
        exit_timeout: seconds that streams in flight get to finish when the server ends.
        give_up_after: starts in a row that were no use, after which a model's process is not started again.
        gateway_host, gateway_port: where the OpenAI-compatible gateway listens; without a port there is none.
    """

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    health_port: int = 8003
    exit_timeout: int = 30
    verbose: bool = False
    give_up_after: int = GIVE_UP_AFTER
    gateway_host: str = "127.0.0.1"
    gateway_port: int | None = None

    @property
    def local_host(self) -> str:
        """An address at which this machine reaches the server."""
        return _local(self.host)

    def address(self, name: str) -> str:
        """host:port at which this machine reaches http, grpc, metrics, health or the gateway."""
        port: int = getattr(self, f"{name}_port")
        host = _local(self.gateway_host) if name == "gateway" else self.local_host
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def ports(self) -> dict[str, int]:
        """Option name -> port."""
        return {
            "--http-port": self.http_port,
            "--grpc-port": self.grpc_port,
            "--metrics-port": self.metrics_port,
            "--health-port": self.health_port,
        }


def _local(host: str) -> str:
    try:
        any_address = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        any_address = False
    return "127.0.0.1" if any_address else host


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def header_pattern(policy_names: Iterable[str]) -> str:
    """RE2 pattern of the headers that reach the models; anchored, since Triton matches parts of names."""
    names = {name.lower() for name in (*FORWARDED_HEADERS, "x-canary", *policy_names)}
    return f"^({'|'.join(re.escape(name) for name in sorted(names))})$"


def server_arguments(
    settings: ServerSettings,
    services: Iterable[Service],
    *,
    repository: Path,
    backends: Path,
    region_prefix: str,
    admin_key: str,
    headers: str,
) -> list[str]:
    """tritonserver's arguments.

    Args:
        services: whose models are loaded at the start, each with the versions that its config.pbtxt names.
        region_prefix: what the names of its shared-memory regions begin with.
        admin_key: without it, nobody controls models, shared memory, traces or logging.
        headers: the forward pattern.
    """
    key = f"{RESTRICTED}:{ADMIN_KEY_NAME}={admin_key}"
    arguments = [
        f"--model-repository={repository}",
        f"--backend-directory={backends}",
        "--model-control-mode=explicit",
        "--exit-on-error=false",
        "--strict-readiness=false",
        f"--http-address={settings.host}",
        f"--http-port={settings.http_port}",
        f"--grpc-address={settings.host}",
        f"--grpc-port={settings.grpc_port}",
        f"--metrics-address={settings.host}",
        f"--metrics-port={settings.metrics_port}",
        f"--http-header-forward-pattern={headers}",
        f"--grpc-header-forward-pattern={headers}",
        f"--http-restricted-api={key}",
        f"--grpc-restricted-protocol={key}",
        f"{REGION_PREFIX_OPTION}={region_prefix}",
        "--backend-config=python,stub-timeout-seconds=120",
        f"--exit-timeout-secs={settings.exit_timeout}",
        "--disable-auto-complete-config",
        f"--log-verbose={int(settings.verbose)}",
    ]
    for service in services:
        arguments += [f"--load-model={model}" for model in service.models]
    return arguments


def settings_of(arguments: Sequence[str]) -> ServerSettings | None:
    """The settings in `server_arguments`, the supervisor's port left at its default; None where one is missing."""
    given = dict(argument.split("=", 1) for argument in arguments if argument.startswith("--") and "=" in argument)
    try:
        return ServerSettings(
            host=given["--grpc-address"],
            http_port=int(given["--http-port"]),
            grpc_port=int(given["--grpc-port"]),
            metrics_port=int(given["--metrics-port"]),
            exit_timeout=int(given["--exit-timeout-secs"]),
            verbose=given.get("--log-verbose", "0") != "0",
        )
    except (KeyError, ValueError):
        return None
