"""`piccard rollback`: the previous version becomes stable again."""

from piccard.errors import OperationError
from piccard.operation import Operation, check_serves
from piccard.outcome import Outcome
from piccard.stable_switch import settled, switch_stable

# Marks the version that was rolled back from, so that a second rollback does not bring it back.
ROLLED_BACK = "rolled back to version"


def rollback(op: Operation) -> Outcome:
    """Swap stable and previous. Done twice it does nothing: going forward again is `piccard promote`.

    Raises:
        OperationError: there is no previous version, or it cannot serve.
    """
    what = "rollback"
    state = op.store.read()
    previous, stable = state.previous, state.stable
    if previous is None:
        raise OperationError("there is no previous version to roll back to; `piccard promote N` chooses one")
    if state.versions[previous].reason.startswith(ROLLED_BACK) and stable is not None and settled(op, stable):
        message = f"version {stable} is stable since the last rollback; `piccard promote {previous}` goes forward again"
        return Outcome(what, op.service.name, False, message, op.dry_run)
    check_serves(op, previous)
    outcome = Outcome(
        what,
        op.service.name,
        True,
        f"version {previous} is stable again, version {stable} is previous",
        op.dry_run,
        {"stable": stable, "previous": previous, "canary": state.canary},
        {"stable": previous, "previous": stable, "canary": None},
    )
    if not op.dry_run:
        switch_stable(op, previous, what, f"{ROLLED_BACK} {previous}")
    return outcome
