"""state.json read and written: whole, durably, and by one process at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from piccard_contract.home import Service
from piccard_contract.lifecycle import ServiceState
from piccard_contract.process_lock import AlreadyHeldError, ProcessLock
from piccard_contract.validation import explain
from pydantic import ValidationError

from piccard.durable_file import write_durably
from piccard.errors import OperationError

# Seconds that a writer of state.json may take.
_WRITE = 30.0

# Seconds that loading a version may take while another waits to change the set of versions.
_LOAD = 24 * 3600.0


class AnotherAtWorkError(OperationError):
    """Another process holds the lock; waiting is the remedy."""


class StateStore:
    """The state.json of one service."""

    def __init__(self, service: Service) -> None:
        self.service = service

    @property
    def exists(self) -> bool:
        return self.service.state_json.exists()

    def read(self) -> ServiceState:
        """The state as it is.

        Raises:
            OperationError: there is none, or it cannot be read.
        """
        path = self.service.state_json
        try:
            return ServiceState.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            raise OperationError(
                f"{self.service.home} holds no service {self.service.name}; run `piccard init {self.service.home}`"
            ) from None
        except (OSError, ValidationError) as error:
            why = explain(error) if isinstance(error, ValidationError) else error
            raise OperationError(f"{path} cannot be read ({why}); run `piccard doctor`") from error

    def write(self, state: ServiceState) -> None:
        """Replace the state; its generation grows by one."""
        state.generation += 1
        self.service.state_json.parent.mkdir(parents=True, exist_ok=True)
        write_durably(self.service.state_json, state.model_dump_json(by_alias=True, indent=2) + "\n")

    @contextmanager
    def change(self) -> Iterator[ServiceState]:
        """The state, to be changed in the block; written when the block ends without an exception."""
        with file_lock(self.service.state_folder / "state.lock", _WRITE, "writing the state"):
            state = self.read()
            before = state.model_dump()
            yield state
            if state.model_dump() != before:
                self.write(state)


@contextmanager
def operator_lock(home: Path, timeout: float = 10.0) -> Iterator[None]:
    """Only one command changes a home at a time.

    Raises:
        AnotherAtWorkError: another one is still at work after `timeout` seconds.
    """
    with file_lock(home / "state" / "operator.lock", timeout, "changing this home"):
        yield


@contextmanager
def control_lock(service: Service, model: str) -> Iterator[None]:
    """Held around each change of a model's loaded versions: such a change names the whole set."""
    with file_lock(service.state_folder / f"control.{model}.lock", _LOAD, "loading a version"):
        yield


def services_of(home: Path) -> list[Service]:
    """The services of a home, by name; a folder of another name is none of them."""
    found = []
    for path in sorted((home / "state").glob("*/state.json")):
        try:
            found.append(Service(home, path.parent.name))
        except ValueError:
            continue
    return found


@contextmanager
def file_lock(path: Path, timeout: float, doing: str) -> Iterator[None]:
    """Hold the lock at `path` for the block.

    Args:
        timeout: seconds to wait for it.
        doing: what another one does meanwhile, for the error.

    Raises:
        AnotherAtWorkError: another process still holds it.
    """
    lock = ProcessLock(path)
    try:
        lock.acquire(timeout)
    except AlreadyHeldError as error:
        raise AnotherAtWorkError(f"another process is {doing} ({error}); wait for it to end") from error
    try:
        yield
    finally:
        lock.release()
