"""The tritonserver of a home that runs already, and its stubs, told by their command lines.

A supervisor that was killed leaves its server running. The kernel's list of processes names it whatever was or was
not written before, and the command line holds all that a new supervisor has to know.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from piccard.server_settings import REGION_PREFIX_OPTION, ServerSettings, settings_of
from piccard.shared_memory import home_prefix
from piccard.triton_binary import STUB_NAME

_PROC = Path("/proc")
_SERVER_NAME = "tritonserver"


@dataclass(frozen=True, slots=True)
class FoundServer:
    """A tritonserver that runs.

    Attributes:
        settings: where it listens; the supervisor's own port is not known to it.
        region_prefix: what the names of its shared-memory regions begin with.
    """

    pid: int
    settings: ServerSettings
    region_prefix: str

    @property
    def grpc(self) -> str:
        """host:port of its gRPC on this machine."""
        return self.settings.address("grpc")


def find_server(home: Path) -> FoundServer | None:
    """The tritonserver that serves `home` now; None where none does. Sees processes of this PID namespace alone."""
    repository = home.absolute() / "model_repository"
    for pid, arguments in _command_lines():
        if (found := server_of(pid, arguments, repository)) is not None:
            return found
    return None


def server_of(pid: int, arguments: Sequence[str], repository: Path) -> FoundServer | None:
    """What a command line tells; None where it is not that of a server of `repository`."""
    if not arguments or Path(arguments[0]).name != _SERVER_NAME:
        return None
    folders = [value for value in _values(arguments, "--model-repository") if _same(Path(value), repository)]
    prefixes = _values(arguments, REGION_PREFIX_OPTION)
    settings = settings_of(arguments)
    if not folders or not prefixes or settings is None:
        return None
    return FoundServer(pid, settings, prefixes[0])


def leftover_stubs(home: Path) -> list[int]:
    """Model processes of servers of `home`; without a server, what a dead one left."""
    prefix = home_prefix(home)
    return [
        pid
        for pid, arguments in _command_lines()
        if arguments and Path(arguments[0]).name == STUB_NAME and any(value.startswith(prefix) for value in arguments)
    ]


def _values(arguments: Sequence[str], option: str) -> list[str]:
    return [value.removeprefix(f"{option}=") for value in arguments if value.startswith(f"{option}=")]


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return one == other


def _command_lines() -> Iterator[tuple[int, list[str]]]:
    for folder in _PROC.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            text = (folder / "cmdline").read_bytes()
        # It ended meanwhile.
        except OSError:
            continue
        yield int(folder.name), text.decode("utf-8", "surrogateescape").split("\0")[:-1]
