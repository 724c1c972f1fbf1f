"""The steps that a runner is at work on: started, and not collected yet."""

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from deepseek_engine.departures import Interrupt
from deepseek_engine.runners.base import ModelRunner
from deepseek_engine.scheduler import Share
from deepseek_engine.step_plan import StepPlan, StepResult


@dataclass(slots=True)
class StepUnderWay:
    """A step that was started.

    Attributes:
        shares: what it runs, by row.
        handle: the runner's.
        began: when it was started, in seconds of `time.perf_counter`.
    """

    shares: list[Share]
    handle: Any
    began: float


class Pipeline:
    """Keeps a runner's steps in order.

    Args:
        runner: executes them, `runner.steps_in_flight` at once.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._steps: deque[StepUnderWay] = deque()
        # When the last step was collected.
        self._collected = 0.0

    def __len__(self) -> int:
        """Steps under way."""
        return len(self._steps)

    @property
    def has_room(self) -> bool:
        """Whether another step may be started before one is collected."""
        return len(self._steps) < self._runner.steps_in_flight

    def start(self, shares: list[Share], plan: StepPlan, interrupt: Interrupt | None = None) -> None:
        """Start a step; what the runner raises leaves the others as they are."""
        began = time.perf_counter()
        self._steps.append(StepUnderWay(shares, self._runner.execute(plan, interrupt), began))

    def pop(self) -> StepUnderWay:
        """Take out the oldest step, to be collected next."""
        return self._steps.popleft()

    def collect(self, step: StepUnderWay) -> tuple[StepResult, float]:
        """Wait for a step.

        Returns:
            Its result, and how many seconds it took: since it was started or, where the one before was collected later,
            since then, for until then the device was at work on that one.
        """
        before = max(step.began, self._collected)
        try:
            result = self._runner.collect(step.handle)
        finally:
            self._collected = time.perf_counter()
        return result, self._collected - before
