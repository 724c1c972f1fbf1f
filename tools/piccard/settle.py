"""Finishes, as a supervisor begins, what a command that was ended left half done; state.json is the truth."""

from collections.abc import Callable, Iterator

from piccard_contract.home import Service
from piccard_contract.lifecycle import ServiceState

from piccard.agreement_checks import config_findings, interrupted_findings, policy_findings, stable_findings
from piccard.disk_checks import leftover_findings
from piccard.errors import OperationError
from piccard.finding import Finding
from piccard.operation import Operation
from piccard.state_store import StateStore, operator_lock
from piccard.triton_control import TritonControl


def settle(services: list[Service], tell: Callable[[str], None], control: TritonControl | None = None) -> None:
    """Bring link, policy and configuration of `services` in line with their state.

    The server's start goes by the configuration, and routers by the link and the policy: where these differ from the
    state, stable would not be what is served. Each repair has its line in the audit log.

    Args:
        control: of the server that runs already; None where none does.
    """
    try:
        with operator_lock(services[0].home):
            for service in services:
                _settle(Operation(service, StateStore(service), control, dry_run=False, tell=tell))
    except OperationError as error:
        tell(f"not looked for what an ended command left: {error}")


def _settle(op: Operation) -> None:
    for finding in list(_findings(op, op.store.read())):
        if finding.repair is None:
            continue
        with op.recorded(f"serve: {finding.trap}", {"problem": finding.problem}, {}):
            finding.repair()
        op.tell(f"{op.service.name}: repaired {finding.trap}: {finding.problem}")


def _findings(op: Operation, state: ServiceState) -> Iterator[Finding]:
    yield from leftover_findings(op)
    yield from stable_findings(op, state)
    yield from policy_findings(op, state)
    yield from interrupted_findings(op, state)
    yield from config_findings(op, state)
