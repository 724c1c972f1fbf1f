"""`piccard canary set` and `canary off`: which version gets a share of the traffic."""

import math
from typing import Any

from piccard_contract.lifecycle import IllegalMoveError, ServiceState, VersionState

from piccard.durable_file import write_durably
from piccard.errors import OperationError
from piccard.operation import Operation, check_serves, record_of
from piccard.outcome import Outcome
from piccard.policy_store import load_policy, mend_policy, new_salt, update_policy


def canary_set(op: Operation, version: int, ratio: float) -> Outcome:
    """Send `ratio` of the traffic to `version`.

    A new version gets a new salt, so that a rollout reaches other callers than the last; a new ratio keeps it, so that
    raising it moves nobody back.

    Raises:
        OperationError: the ratio is out of range, or `version` is stable or cannot serve.
    """
    if not (math.isfinite(ratio) and 0.0 <= ratio <= 1.0):
        raise OperationError(f"--ratio takes 0 to 1, not {ratio:g}", exit_code=2)
    # Minus zero is zero, and is told so.
    ratio = abs(ratio)
    state = op.store.read()
    found = record_of(state, version)
    if state.stable == version:
        raise OperationError(f"version {version} is stable; the canary has to be another")
    if found not in (VersionState.READY, VersionState.CANARY, VersionState.PREVIOUS):
        raise OperationError(
            f"version {version} is {found}; a canary has to be loaded and probed: see `piccard status`"
        )
    check_serves(op, version)
    policy = load_policy(op.service)
    values: dict[str, Any] = {"canary": version, "traffic_ratio": ratio}
    if policy.canary != version or not policy.salt:
        values["salt"] = new_salt()
    unchanged = state.canary == version and found is VersionState.CANARY
    if unchanged and (policy.canary, policy.traffic_ratio) == (version, ratio):
        message = f"version {version} is the canary at {ratio:g} already"
        return Outcome(f"canary set {version} {ratio:g}", op.service.name, False, message, op.dry_run)
    message = f"version {version} is the canary and gets {100 * ratio:g} % of the traffic"
    return _apply(op, f"canary set {version} {ratio:g}", message, state, version, values)


def canary_off(op: Operation) -> Outcome:
    """End the canary; its version stays loaded."""
    if not op.dry_run and (trouble := mend_policy(op.service)):
        op.tell(trouble)
    state, policy = op.store.read(), load_policy(op.service)
    if state.canary is None and policy.canary is None and policy.traffic_ratio == 0.0:
        return Outcome("canary off", op.service.name, False, "there is no canary", op.dry_run)
    values = {"canary": None, "traffic_ratio": 0.0}
    return _apply(op, "canary off", "no version is a canary", state, None, values)


def _apply(
    op: Operation, what: str, message: str, state: ServiceState, version: int | None, values: dict[str, Any]
) -> Outcome:
    policy_text = op.service.policy_file.read_text(encoding="utf-8")
    ratio = load_policy(op.service).traffic_ratio
    before = {"canary": state.canary, "ratio": ratio}
    after = {"canary": version, "ratio": values["traffic_ratio"]}
    if not op.dry_run:
        with op.recorded(what, before, after) as steps:
            steps.do(lambda: _name_canary(op, version), undo=lambda: _restore(op, state))
            steps.do(
                lambda: update_policy(op.service, **values),
                undo=lambda: write_durably(op.service.policy_file, policy_text),
            )
    return Outcome(what, op.service.name, True, message, op.dry_run, before, after)


def _name_canary(op: Operation, version: int | None) -> None:
    with op.store.change() as state:
        old = state.canary
        try:
            if old not in (None, version) and state.versions[old].state is VersionState.CANARY:
                state.move(old, VersionState.READY)
            if version is not None:
                state.move(version, VersionState.CANARY)
        except IllegalMoveError as error:
            raise OperationError(f"{error}; see `piccard status`") from error
        state.canary = version
        if version is not None and state.previous == version:
            # A version that was rolled back gets its second chance as a canary.
            state.previous, state.previous_since = None, None


def _restore(op: Operation, before: ServiceState) -> None:
    with op.store.change() as state:
        state.canary, state.previous, state.previous_since = before.canary, before.previous, before.previous_since
        state.versions = before.versions
