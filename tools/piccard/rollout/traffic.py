"""What a rollout does to a service: each of these can be done again after any interruption."""

from piccard_canary.rollout.course import Phase, RolloutState
from piccard_contract.home import Service
from piccard_contract.lifecycle import SERVING_STATES, VersionState

from piccard.canary import canary_off, canary_set
from piccard.errors import OperationError
from piccard.operation import Operation
from piccard.policy_store import load_policy, mend_policy, update_policy
from piccard.promote import promote
from piccard.retire import retire
from piccard.state_store import StateStore

# Phases after the promotion.
_PROMOTED = frozenset({Phase.BAKING, Phase.ROLLING_BACK, Phase.RETIRING})


def take_away(service: Service, canary: int) -> None:
    """Set the ratio to 0 where it is the canary's; it waits for no other command, and no edit stands in its way."""
    try:
        policy = load_policy(service)
    except OperationError:
        mend_policy(service)
        policy = load_policy(service)
    if policy.canary == canary and policy.traffic_ratio > 0.0:
        update_policy(service, traffic_ratio=0.0)


def apply_ratio(op: Operation, state: RolloutState) -> None:
    """Give the canary the share of the present step.

    Raises:
        OperationError: it cannot serve now.
    """
    canary_set(op, state.canary, state.ratio)


def end_canary(op: Operation, state: RolloutState) -> None:
    """No version is the canary any more, where it was this rollout's."""
    if state.canary in (op.store.read().canary, load_policy(op.service).canary):
        canary_off(op)


def make_stable(op: Operation, version: int) -> None:
    """Promote `version`, or bring a promotion of it to its end."""
    promote(op, version)


def retire_old(op: Operation, state: RolloutState) -> None:
    """Retire the version that was stable before, unless it is a canary now; it ends after its last stream."""
    found = op.store.read()
    record = found.versions.get(state.stable)
    if record is not None and record.state is not VersionState.RETIRED and found.canary != state.stable:
        retire(op, state.stable, force=True, wait=0.0)


def interference(service: Service, state: RolloutState) -> str:
    """What somebody else did to versions or traffic that this rollout goes by; empty where nothing was.

    Raises:
        OperationError: state.json cannot be read.
    """
    if state.phase is Phase.ABORTING:
        return ""
    found = StateStore(service).read()
    if found.stable == state.canary and state.phase in _PROMOTED | {Phase.PROMOTING}:
        # One that was promoting was interrupted, and brings it to its end.
        return ""
    if found.stable == state.stable and state.phase is Phase.ROLLING_BACK:
        return ""
    if found.stable != state.stable or state.phase in _PROMOTED:
        return f"version {found.stable} was made stable"
    record = found.versions.get(state.canary)
    if record is None or record.state not in SERVING_STATES:
        why = f" ({record.reason})" if record is not None and record.reason else ""
        return f"version {state.canary} is {record.state if record else 'gone'}{why}"
    try:
        policy = load_policy(service)
    except OperationError:
        # A broken edit is not in use: routers keep the last good policy.
        return ""
    if not state.applied:
        return ""
    if policy.canary != state.canary:
        return f"version {state.canary} is the canary no more"
    # Who promotes, or approved it, goes by the canary alone, unless its traffic was taken away.
    if policy.traffic_ratio != state.ratio and (state.phase is not Phase.PROMOTING or policy.traffic_ratio == 0.0):
        return f"the ratio was set to {policy.traffic_ratio:g}"
    return ""
