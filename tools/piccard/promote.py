"""`piccard promote N`: version N becomes stable."""

from piccard_contract.lifecycle import UNPROVEN_STATES, VersionState

from piccard.errors import OperationError
from piccard.operation import Operation, check_serves, record_of
from piccard.outcome import Outcome
from piccard.stable_switch import settled, switch_stable


def promote(op: Operation, version: int) -> Outcome:
    """Make `version` stable; the old stable version becomes previous and stays loaded, the canary ends.

    Raises:
        OperationError: `version` cannot serve, or a step failed and all was undone.
    """
    what = f"promote {version}"
    state = op.store.read()
    found = record_of(state, version)
    if settled(op, version):
        return Outcome(what, op.service.name, False, f"version {version} is stable already", op.dry_run)
    if found in UNPROVEN_STATES:
        raise OperationError(f"version {version} is {found}; it is loaded and probed while `piccard serve` runs")
    if found in (VersionState.FAILED, VersionState.RETIRED, VersionState.DRAINING):
        raise OperationError(f"version {version} is {found} and cannot become stable; publish it again")
    check_serves(op, version)
    outcome = Outcome(
        what,
        op.service.name,
        True,
        f"version {version} is stable" + (f", version {state.stable} is previous" if state.stable != version else ""),
        op.dry_run,
        {"stable": state.stable, "previous": state.previous, "canary": state.canary},
        {"stable": version, "previous": state.stable if state.stable != version else state.previous, "canary": None},
    )
    if not op.dry_run:
        switch_stable(op, version, what, f"version {version} was promoted")
    return outcome
