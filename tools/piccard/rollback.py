"""`piccard rollback`: the previous version becomes stable again."""

from piccard.errors import OperationError
from piccard.operation import Operation, check_serves
from piccard.outcome import Outcome
from piccard.stable_switch import switch_stable


def rollback(op: Operation) -> Outcome:
    """Swap stable and previous; done twice it returns to where one was.

    Raises:
        OperationError: there is no previous version, or it cannot serve.
    """
    what = "rollback"
    state = op.store.read()
    previous, stable = state.previous, state.stable
    if previous is None:
        raise OperationError("there is no previous version to roll back to; `piccard promote N` chooses one")
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
        switch_stable(op, previous, what, f"rolled back to version {previous}")
    return outcome
