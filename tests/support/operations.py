"""Operations on a home that no server runs, for tests of what commands do with one."""

from piccard.operation import Operation
from piccard.state_store import StateStore
from piccard_contract.home import Service


def operation_of(service: Service) -> Operation:
    """One that takes no lock and prints what it tells."""
    return Operation(service, StateStore(service), None, dry_run=False, tell=print)
