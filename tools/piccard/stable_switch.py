"""Makes another version the stable one: state first, link last; every step can be undone."""

from collections.abc import Callable

from piccard_contract.lifecycle import IllegalMoveError, ServiceState, VersionState, now

from piccard.durable_file import write_durably
from piccard.errors import OperationError
from piccard.operation import Operation
from piccard.policy_store import load_policy, mend_policy, update_policy
from piccard.repository import configured_versions, point_stable, stable_target, write_stable_config


def settled(op: Operation, version: int) -> bool:
    """Whether state, link and configuration all say that `version` is stable."""
    return (
        op.store.read().stable == version
        and stable_target(op.service) == version
        and configured_versions(op.service) == [version]
    )


def switch_stable(op: Operation, version: int, what: str, reason: str) -> None:
    """Make `version` stable, the old one previous, and end the canary.

    The rename of the link is the moment: routers read it at every request. The configuration on disk is what the
    next start of a server goes by; a running one does not look at it.

    Args:
        what: the command, for the audit log.
        reason: noted with the version that was stable.

    Raises:
        OperationError: a step failed; what went before is undone.
    """
    before = op.store.read()
    after = switched(before, version, reason)
    old = before.stable
    # No edit of the policy may stand in the way of a rollback.
    trouble = mend_policy(op.service)
    if trouble:
        op.tell(trouble)
    policy_text = op.service.policy_file.read_text(encoding="utf-8")
    with op.recorded(what, _roles(before), _roles(after)) as steps:
        steps.do(
            lambda: _replace(op, lambda state: switched(state, version, reason)),
            undo=lambda: _replace(op, lambda _: before),
        )
        steps.do(lambda: _end_canary(op), undo=lambda: write_durably(op.service.policy_file, policy_text))
        if old is not None:
            steps.do(
                lambda: write_stable_config(op.service, version), undo=lambda: write_stable_config(op.service, old)
            )
            steps.do(lambda: point_stable(op.service, version), undo=lambda: point_stable(op.service, old))
        else:
            write_stable_config(op.service, version)
            point_stable(op.service, version)


def switched(state: ServiceState, version: int, reason: str) -> ServiceState:
    """The state after `version` became stable.

    Raises:
        OperationError: `version` may not become stable as it is.
    """
    after = state.model_copy(deep=True)
    if after.stable == version:
        return after
    old, canary, previous = after.stable, after.canary, after.previous
    try:
        if canary not in (None, version) and after.versions[canary].state is VersionState.CANARY:
            after.move(canary, VersionState.READY)
        if previous not in (None, version) and after.versions[previous].state is VersionState.PREVIOUS:
            after.move(previous, VersionState.READY)
        # A stable version that failed keeps that state, and is previous all the same.
        if old is not None and after.versions[old].state is VersionState.STABLE:
            after.move(old, VersionState.PREVIOUS, reason)
        after.move(version, VersionState.STABLE)
    except IllegalMoveError as error:
        raise OperationError(f"{error}; see `piccard status`") from error
    after.stable, after.canary, after.previous, after.previous_since = version, None, old, now()
    return after


def _replace(op: Operation, make: Callable[[ServiceState], ServiceState]) -> None:
    with op.store.change() as state:
        wanted = make(state)
        for field in type(state).model_fields:
            if field != "generation":
                setattr(state, field, getattr(wanted, field))


def _end_canary(op: Operation) -> None:
    policy = load_policy(op.service)
    if policy.canary is not None or policy.traffic_ratio:
        update_policy(op.service, canary=None, traffic_ratio=0.0)


def _roles(state: ServiceState) -> dict[str, int | None]:
    return {"stable": state.stable, "canary": state.canary, "previous": state.previous}
