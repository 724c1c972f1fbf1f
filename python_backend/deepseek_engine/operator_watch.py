"""What serves a version's operators, for its report and its metrics. Knows no torch; `operator_tables` makes one."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from piccard_contract.operators import FusionUse, OperatorsReport, OperatorUse

Counts = dict[tuple[str, str], int]


@dataclass(frozen=True, slots=True)
class OperatorFigures:
    """Totals of a process, and states.

    Attributes:
        fallbacks: steps in which an operator ran its reference on a GPU, by (operator, cause).
        fallback_seconds: what it takes of a step, by operator, where it was measured.
        replays, captures: of CUDA graphs.
        compilations: of kernels.
        ungraphed: steps that were launched kernel by kernel, by cause.
    """

    fallbacks: Counts = field(default_factory=dict)
    fallback_seconds: dict[str, float] = field(default_factory=dict)
    replays: int = 0
    captures: int = 0
    compilations: int = 0
    ungraphed: dict[str, int] = field(default_factory=dict)


class OperatorWatch:
    """Tells what serves a version's operators; made after its warm-up.

    Args:
        figures: the process's totals, cheap, called on any thread.
        operators: the table of what was chosen.
        fusions: for this model and device.
        step_operators, fused_operators: of a decode step.
        revision: grows when the table of operators has something new.
        precision: of weights and activations.
    """

    def __init__(
        self,
        *,
        figures: Callable[[], OperatorFigures],
        operators: Callable[[], list[OperatorUse]],
        fusions: list[FusionUse],
        step_operators: int,
        fused_operators: int,
        revision: Callable[[], int],
        precision: str,
        graphs: bool,
    ) -> None:
        self._figures = figures
        self._operators = operators
        self._fusions = fusions
        self._step_operators, self._fused_operators = step_operators, fused_operators
        self._revision = revision
        self._precision = precision
        self._graphs = graphs
        self._warm = figures()

    @property
    def revision(self) -> int:
        """Another number once the tables of `report` have something new."""
        return self._revision()

    @property
    def fused_share(self) -> float:
        """0 to 1."""
        return self._fused_operators / self._step_operators if self._step_operators else 0.0

    def figures(self) -> OperatorFigures:
        """The process's totals and states."""
        return self._figures()

    def report(self, version: int, device: str, runner: str) -> OperatorsReport:
        """Everything, with what has happened since the warm-up."""
        now, warm = self._figures(), self._warm
        fallbacks: dict[str, int] = {}
        for (operator, _), count in now.fallbacks.items():
            fallbacks[operator] = fallbacks.get(operator, 0) + count
        return OperatorsReport(
            version=version,
            pid=os.getpid(),
            device=device,
            precision=self._precision,
            runner=runner,
            operators=self._operators(),
            fusions=self._fusions,
            step_operators=self._step_operators,
            fused_operators=self._fused_operators,
            graphs=self._graphs,
            replays=now.replays - warm.replays,
            captures=now.captures - warm.captures,
            compilations=now.compilations - warm.compilations,
            ungraphed=_since(now.ungraphed, warm.ungraphed),
            fallbacks=fallbacks,
        )


def _since(now: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    grown = {cause: count - before.get(cause, 0) for cause, count in now.items()}
    return {cause: count for cause, count in grown.items() if count}
