"""What a command works with: a service, its state, the running server if there is one, and the audit log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from piccard_contract.home import Service, version_owner
from piccard_contract.lifecycle import ServiceState, VersionState
from piccard_contract.live_state import LiveState, LiveStateError, Section
from piccard_contract.version_file import VersionFileError, read_version_file

from piccard.audit import write_audit
from piccard.containment import check_version_folder
from piccard.errors import OperationError
from piccard.state_store import StateStore, operator_lock, services_of
from piccard.triton_control import TritonControl, connect
from piccard.undo import Steps

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Operation:
    """One command at work.

    Attributes:
        control: of the running server; None where none runs.
        dry_run: say what would be done and do nothing.
        tell: takes progress for people.
    """

    service: Service
    store: StateStore
    control: TritonControl | None
    dry_run: bool
    tell: Tell

    @contextmanager
    def recorded(self, what: str, before: dict[str, Any], after: dict[str, Any]) -> Iterator[Steps]:
        """Steps that are undone together; the audit log tells that they were done, or why they were undone."""
        try:
            with Steps() as steps:
                yield steps
        except BaseException as error:
            try:
                write_audit(self.service, what, before, after, failed=str(error) or type(error).__name__)
            except OSError as failure:
                error.add_note(f"the audit log has no line of it: {failure}")
            raise
        try:
            write_audit(self.service, what, before, after)
        except OSError as error:
            # It is done all the same, and to undo it would need that disk too.
            self.tell(f"{what} is done, but the audit log has no line of it: {error}")


@contextmanager
def operation(
    home: Path, service_name: str, *, dry_run: bool = False, tell: Tell = print, must_answer: bool = True
) -> Iterator[Operation]:
    """A command's surroundings; with dry_run nothing is locked, since nothing is written.

    Args:
        must_answer: fail where the server runs and does not answer; else it is told, and the command does without.

    Raises:
        OperationError: the service's name is none, another command is at work, or the server does not answer.
    """
    home = home.absolute()
    try:
        service = Service(home, service_name)
    except ValueError as error:
        raise OperationError(f"--service: {error}", exit_code=2) from error
    if not services_of(home):
        raise OperationError(f"{home} is no home; run `piccard init {home}`")
    if dry_run:
        with _operation(service, tell, dry_run=True, must_answer=must_answer) as found:
            yield found
        return
    with operator_lock(home), _operation(service, tell, dry_run=False) as found:
        yield found


@contextmanager
def _operation(service: Service, tell: Tell, *, dry_run: bool, must_answer: bool = True) -> Iterator[Operation]:
    try:
        control = connect(service.home, services_of(service.home))
    except OperationError as error:
        if must_answer:
            raise
        tell(str(error))
        control = None
    try:
        yield Operation(service, StateStore(service), control, dry_run, tell)
    finally:
        if control is not None:
            control.close()


def sections_of(service: Service) -> dict[str, Section]:
    """What each process of a service published last, by its name.

    Raises:
        OperationError: the state file is none.
    """
    if not service.live_state.exists():
        return {}
    try:
        live = LiveState(service.live_state, service.run_folder)
    except LiveStateError as error:
        raise OperationError(str(error)) from error
    try:
        return {section.owner: section for section in live.sections()}
    finally:
        live.close()


def record_of(state: ServiceState, version: int) -> VersionState:
    """The state of `version`.

    Raises:
        OperationError: there is no such version; the message names those there are.
    """
    record = state.versions.get(version)
    if record is None:
        there = ", ".join(str(number) for number in sorted(state.versions)) or "none"
        raise OperationError(f"there is no version {version} of {state.service}; there are: {there}")
    return record.state


def check_serves(op: Operation, version: int) -> None:
    """Whether requests may go to `version`: its folder is whole and, where a server runs, it is loaded and ready.

    Raises:
        OperationError: it is not.
    """
    folder = op.service.version_folder(version)
    try:
        read_version_file(folder)
    except (OSError, VersionFileError) as error:
        raise OperationError(f"version {version} is not whole ({error}); publish it again") from error
    if not (folder / "model.py").is_file():
        raise OperationError(f"version {version} is not whole ({folder}/model.py is missing); publish it again")
    check_version_folder(op.service, version)
    if op.control is None:
        return
    if version not in op.control.ready_versions(op.service.llm):
        raise OperationError(f"version {version} is not loaded by the server; see `piccard status`")
    live = LiveState(op.service.live_state, op.service.run_folder)
    try:
        section = live.read(version_owner(version))
    finally:
        live.close()
    if section is None or not section.alive or section.data.get("phase") != "ready":
        raise OperationError(f"the process of version {version} is not ready; see `piccard status`")
