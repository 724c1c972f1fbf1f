"""A rollout over a service whose server is a double: requests are lines of its log, and time passes when told to."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from operated_service import Fault, OperatedService
from piccard.errors import OperationError
from piccard.operation import Operation
from piccard.policy_store import load_policy
from piccard.rollout.commands import start
from piccard.rollout.controller import Controller
from piccard.rollout.store import RolloutStore
from piccard.rollout.synthetic import Behaviour, golden_of
from piccard_canary.rollout.course import ENDED, Phase, RolloutState
from piccard_canary.rollout.golden import GoldenComparison
from piccard_canary.rollout.plan import Plan, default_metrics
from write_points import Killed

# 2025-01-01.
BEGINNING = 1735689600.0

# Few requests are enough to pass.
_LOOSE = {
    name: rule.model_copy(update={"margin": 0.06})
    for name, rule in default_metrics().items()
    if rule.kind == "proportion"
}

PLAN = Plan(
    steps=[0.05, 0.5, 1.0],
    interval=20.0,
    look=10.0,
    min_samples=50,
    hysteresis=1,
    hold=3,
    bake=20.0,
    retire_old=True,
    metrics=_LOOSE,
)

# Requests of each version between two looks.
REQUESTS = 60


class KnownGolden:
    """Stands for piccard.rollout.golden_watch.GoldenWatch, which asks a real server."""

    def __init__(self, found: GoldenComparison | None) -> None:
        self.found = found

    def ask(self) -> None:
        pass

    def close(self) -> None:
        pass


class RolloutScene:
    """Version 2 is rolled out beside version 1.

    Attributes:
        errors: share of the requests of the canary that fail from now on.
        golden: what both versions make of golden prompts, of those who are asked from now on.
        asked: how often they were asked.
        kills: how often the controller was killed.
        said: what controllers told.
        ratios: every ratio of policy.yaml that was met between two ticks.
    """

    def __init__(self, world: OperatedService, plan: Plan = PLAN) -> None:
        self.world = world
        self.service = world.service
        self.store = RolloutStore(world.service)
        self.now = BEGINNING
        self.errors = 0.0
        self.golden: GoldenComparison | None = golden_of(Behaviour(), seed=0)
        self.asked = 0
        self.kills = 0
        self.said: list[str] = []
        self.ratios: list[float] = []
        self._controller: Controller | None = None
        start(world.operation(), 2, plan)
        # The command goes by the real time.
        state = self.state().model_copy(update={"started": self.now, "since": self.now})
        self.store.write(state)

    def state(self) -> RolloutState:
        found = self.store.read()
        assert found is not None
        return found

    def controller(self) -> Controller:
        """The one that lives; a new one where the last was killed."""
        if self._controller is None:
            self._controller = Controller(
                self.service, self.said.append, operate=self._operate, golden=self._ask, clock=lambda: self.now
            )
        return self._controller

    def close(self) -> None:
        if self._controller is not None:
            self._controller.close()
            self._controller = None

    def tick(self, fault: Fault = None) -> None:
        """Some requests, and one tick, which may be killed or fail at a write."""
        self.requests()
        self.now += PLAN.look
        self.controller()
        try:
            with self.world.armed(fault):
                self.controller().tick()
        except Killed:
            # The kernel frees its lock.
            self.close()
            self.kills += 1
        except (OperationError, OSError) as error:
            self.said.append(str(error))
        self.ratios.append(load_policy(self.service).traffic_ratio)

    def run(self, fault: tuple[str, int] | None = None, most: int = 60) -> RolloutState:
        """Tick until the rollout has ended, or waits for a person.

        Args:
            fault: "kill" or "fail", and the point at which it happens, counted over all ticks.
        """
        passed = 0
        for _ in range(most):
            left = None if fault is None or fault[1] < passed else (fault[0], fault[1] - passed)
            self.tick(left)
            passed += len(self.world.points.passed)
            if self.state().phase in ENDED | {Phase.PAUSED, Phase.WAITING}:
                break
        self.points_passed = passed
        return self.state()

    def requests(self) -> None:
        """Lines of the log since the last tick."""
        state = self.state()
        alone = load_policy(self.service).canary is None
        lines = []
        for number in range(REQUESTS):
            failed = number < round(self.errors * REQUESTS)
            lines.append(self._line(state.canary, failed=failed, decision="stable" if alone else "ratio"))
            if not alone and state.ratio < 1.0:
                lines.append(self._line(state.stable, failed=False, decision="ratio"))
        self.service.request_log.parent.mkdir(parents=True, exist_ok=True)
        with self.service.request_log.open("a", encoding="utf-8") as log:
            log.writelines(lines)

    def _line(self, version: int, *, failed: bool, decision: str) -> str:
        at = datetime.fromtimestamp(self.now + 1.0, UTC).isoformat(timespec="milliseconds")
        known = {"at": at, "decision": decision, "version": version, "others": 1}
        known |= {"prompt_tokens": 10, "completion_tokens": 5}
        times = {"first_token_s": 0.1, "token_gap_s": 0.01, "first_load": 4.2, "gap_load": 4.2}
        attempts = [{"version": version, "code": "INTERNAL"}] if failed else []
        return json.dumps(known | times | {"code": "INTERNAL" if failed else "OK", "attempts": attempts}) + "\n"

    def _ask(self, state: RolloutState) -> KnownGolden:
        assert (state.canary, state.stable) == (2, 1)
        self.asked += 1
        return KnownGolden(self.golden)

    @contextmanager
    def _operate(self) -> Iterator[Operation]:
        yield self.world.operation()
