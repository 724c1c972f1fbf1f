"""Runs one service's rollout: looks, decides and acts. Killed at any instruction, the next one goes on."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from piccard_canary.rollout.course import (
    ENDED,
    WATCHED,
    Move,
    Phase,
    RolloutState,
    baking,
    entered,
    moved,
    watched_anew,
)
from piccard_canary.rollout.from_log import ended_at, observed, parse_line
from piccard_canary.rollout.golden import GoldenComparison
from piccard_canary.rollout.judgement import Judgement, figures
from piccard_canary.rollout.observations import Observation, Observations
from piccard_canary.rollout.watcher import Watcher
from piccard_contract.home import Service
from piccard_contract.process_lock import ProcessLock

from piccard.audit import write_audit
from piccard.errors import OperationError
from piccard.operation import Operation, operation
from piccard.rollout.golden_scores import compare
from piccard.rollout.golden_watch import Golden, GoldenWatch
from piccard.rollout.request_tail import RequestTail
from piccard.rollout.store import RolloutStore
from piccard.rollout.traffic import (
    apply_ratio,
    end_canary,
    interference,
    make_stable,
    retire_old,
    take_away,
)

OWNER = "rollout"

# Seconds by which a line of the request log may lie in the future.
_SMALL_STEP = 1.0

Tell = Callable[[str], None]
Operate = Callable[[], AbstractContextManager[Operation]]
AskGolden = Callable[[RolloutState], Golden]


class Controller:
    """The one process that acts for a service's rollout; a lock that the kernel frees keeps a second one out.

    Args:
        tell: takes each line for people.
        operate: begins an operation on the service; tests stand in for it.
        golden: has both versions of a rollout answer golden prompts; tests stand in for it too.
        clock: Unix time.

    Raises:
        AlreadyHeldError: another controller acts.
    """

    def __init__(
        self,
        service: Service,
        tell: Tell,
        *,
        operate: Operate | None = None,
        golden: AskGolden | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._service = service
        self._tell = tell
        self._operate = operate or (lambda: operation(service.home, service.name, tell=tell))
        self._ask_golden = golden or (lambda state: GoldenWatch(partial(compare, service, state.canary, state.stable)))
        self._golden: Golden | None = None
        self._golden_for: object = None
        self._heard: GoldenComparison | None = None
        self._clock = clock
        self._store = RolloutStore(service)
        self._watcher: Watcher | None = None
        self._tail: RequestTail | None = None
        self._looked_at = 0.0
        self._lock = ProcessLock(service.process_lock(OWNER))
        self._lock.acquire(timeout=0.5)

    def close(self) -> None:
        """Let another one act."""
        self._let_go()
        self._lock.release()

    def tick(self) -> RolloutState | None:
        """Do what is due; the rollout as it is then, or None where there is none.

        Raises:
            OperationError: something stands in the way; the next tick tries again.
        """
        state = self._store.read()
        if state is None or state.phase in ENDED:
            self._let_go()
            return state
        if state.phase in WATCHED or state.phase is Phase.BAKING:
            return self._look(state)
        return self._finish(state)

    def _look(self, state: RolloutState) -> RolloutState:
        now = self._clock()
        if now < state.since:
            # The clock was set back: what it told before lies in the future, and nothing would be due.
            anew = self._write(state, watched_anew(state, now))
            if anew is state:
                return state
            state = anew
        watcher = self._watch(state)
        canary_gone = interference(self._service, state)
        due = not 0 <= now - self._looked_at < state.plan.look
        golden = self._golden_of(state, again=due)
        # Who hears of wrong weights does not wait for the next look.
        due = due or (golden is not None and golden is not self._heard)
        self._heard = golden
        to_apply = state.phase is Phase.RUNNING and not state.applied and not _waits(state, golden, now)
        if not (due or canary_gone):
            return self._apply(state) if to_apply else state
        self._looked_at = now
        self._read(watcher, state)
        looked = watcher.look(state, now, golden)
        if looked is None:
            return state
        judgement, move = looked
        if canary_gone and move not in (Move.ABORT, Move.ROLL_BACK):
            return self._interfered(state, canary_gone, now)
        if move is Move.HOLD and to_apply:
            return self._apply(state)
        return self._move(state, judgement, move, now)

    def _golden_of(self, state: RolloutState, *, again: bool) -> GoldenComparison | None:
        """What both versions make of the golden prompts in this step.

        Args:
            again: whether those that could not be answered are asked again.
        """
        wanted = (state.started, state.canary, state.step, state.phase is Phase.BAKING)
        if self._golden is None or self._golden_for != wanted:
            if self._golden is not None:
                self._golden.close()
            self._golden, self._golden_for = self._ask_golden(state), wanted
            again = True
        if again:
            self._golden.ask()
        return self._golden.found

    def _watch(self, state: RolloutState) -> Watcher:
        """The windows of what is watched now; those of another step, or another rollout, are let go."""
        if self._watcher is None or self._watcher.since != state.since:
            if self._tail is not None:
                self._tail.close()
            # The log first: where it cannot be opened now, the next tick tries again.
            self._tail = RequestTail(self._service.request_log, state.since)
            self._watcher = Watcher(state.since)
        return self._watcher

    def _let_go(self) -> None:
        self._watcher = None
        if self._tail is not None:
            self._tail.close()
            self._tail = None
        if self._golden is not None:
            self._golden.close()
            self._golden = None

    def _read(self, watcher: Watcher, state: RolloutState) -> None:
        assert self._tail is not None
        # Requests end while this is read, and a small step back of the clock hides none.
        latest = self._clock() + _SMALL_STEP
        seen: dict[int, list[Observation]] = {state.canary: [], state.stable: []}
        for text in self._tail.lines():
            line = parse_line(text)
            # What ended in the future did so before the clock was set back, and may have been counted.
            if line is None or not state.since <= ended_at(line) <= latest:
                continue
            for version, observation in observed(line, state.canary):
                if version in seen:
                    seen[version].append(observation)
        watcher.take(Observations.of(seen[state.canary]), Observations.of(seen[state.stable]))

    def _move(self, state: RolloutState, judgement: Judgement, move: Move, now: float) -> RolloutState:
        if move is Move.ABORT:
            # Before anything is written down: no further request meets what failed.
            take_away(self._service, state.canary)
        after = self._write(state, moved(state, move, judgement, now))
        if move is Move.HOLD or after is state:
            return after
        self._say(after, judgement)
        return self._finish(after) if after.phase not in ENDED else after

    def _interfered(self, state: RolloutState, what: str, now: float) -> RolloutState:
        after = self._given_way(state, what, now)
        if after is state:
            return state
        after = self._write(state, after)
        self._say(after)
        return after

    def _given_way(self, state: RolloutState, what: str, now: float) -> RolloutState:
        """What somebody else's change makes of the state: a rollout does not fight with people."""
        if state.phase in (Phase.BAKING, Phase.ROLLING_BACK, Phase.RETIRING):
            return entered(state, Phase.ROLLED_BACK, f"{what} by somebody else", now)
        if what.startswith("the ratio was set to") and not what.endswith(" 0"):
            if state.phase is Phase.PAUSED:
                return state
            return entered(state, Phase.PAUSED, f"{what} by somebody else; `resume` sets it to {state.ratio:g}", now)
        take_away(self._service, state.canary)
        return entered(state, Phase.ABORTING, what, now)

    def _apply(self, state: RolloutState) -> RolloutState:
        """Set the ratio of a step; its time counts from then on."""
        with self._operate() as op, self._store.locked():
            if self._changed(state):
                return state
            apply_ratio(op, state)
            after = state.model_copy(update={"applied": True, "since": self._clock()})
            after = self._store.write(after)
        self._say(after)
        return after

    def _finish(self, state: RolloutState) -> RolloutState:
        """Carry out what the phase says, and note that it is done."""
        if state.phase is Phase.RUNNING and not state.applied:
            return self._apply(state)
        if state.phase in WATCHED or state.phase is Phase.BAKING:
            return state
        if state.phase is Phase.ABORTING:
            # Another command may have written its older policy since.
            take_away(self._service, state.canary)
        with self._operate() as op, self._store.locked():
            if self._changed(state):
                return state
            # Whoever was killed in this phase may come back to what others have changed since.
            what = interference(self._service, state)
            after = self._given_way(state, what, self._clock()) if what else self._carried_out(op, state)
            after = self._store.write(after)
        self._say(after)
        return after

    def _carried_out(self, op: Operation, state: RolloutState) -> RolloutState:
        now = self._clock
        if state.phase is Phase.ABORTING:
            end_canary(op, state)
            return entered(state, Phase.ABORTED, state.reason, now())
        if state.phase is Phase.PROMOTING:
            make_stable(op, state.canary)
            return baking(state, now())
        if state.phase is Phase.ROLLING_BACK:
            make_stable(op, state.stable)
            return entered(state, Phase.ROLLED_BACK, state.reason, now())
        retire_old(op, state)
        return entered(state, Phase.PROMOTED, state.reason, now())

    def _write(self, before: RolloutState, after: RolloutState) -> RolloutState:
        """Write the state down, unless a command changed it meanwhile: then that one stands, and is met next time."""
        with self._store.locked():
            return before if self._changed(before) else self._store.write(after)

    def _changed(self, state: RolloutState) -> bool:
        found = self._store.read()
        return found is None or (found.started, found.generation) != (state.started, state.generation)

    def _say(self, state: RolloutState, judgement: Judgement | None = None) -> None:
        """Tell people and the audit log of a state, and of the figures that led to it."""
        told: dict[str, Any] = {"phase": state.phase.value, "ratio": state.ratio, "reason": state.reason}
        if judgement is not None:
            told["metrics"] = figures(judgement)
        self._tell(
            f"{self._service.name}: rollout of version {state.canary}: {state.phase}, step {state.ratio:g}"
            + (f": {state.reason}" if state.reason else "")
        )
        try:
            write_audit(self._service, f"rollout {state.canary}", {}, told)
        except OSError as error:
            self._tell(f"the audit log has no line of it: {error}")


def _waits(state: RolloutState, golden: GoldenComparison | None, now: float) -> bool:
    """Whether the first step waits for golden prompts, so that nobody meets wrong weights; an interval at most."""
    return state.step == 0 and golden is None and 0 <= now - state.started < state.plan.interval


def tick_told(controller: Controller, tell: Tell, last: str) -> str:
    """A tick whose trouble is told once.

    Args:
        last: what was told last.

    Returns:
        the trouble; empty where there was none.
    """
    try:
        controller.tick()
    except (OperationError, OSError) as error:
        trouble = str(error)
    except Exception as error:
        # A defect must not end the thread that would take the traffic of a bad canary away.
        trouble = repr(error)
    else:
        return ""
    if trouble != last:
        tell(f"the rollout goes on later: {trouble}")
    return trouble
