"""Looks at a rollout: adds up what was observed since its step began, and tells what follows."""

from piccard_canary.rollout.course import ENDED, Move, Phase, RolloutState, judges_alone, next_move
from piccard_canary.rollout.golden import GoldenComparison
from piccard_canary.rollout.judgement import Counts, Judgement
from piccard_canary.rollout.observations import Observations
from piccard_canary.rollout.verdict import judge, judge_alone
from piccard_canary.rollout.window import Window

# Phases in which observations count.
_LOOKS = frozenset(Phase) - ENDED - {Phase.ABORTING, Phase.PROMOTING, Phase.ROLLING_BACK, Phase.RETIRING}


class Watcher:
    """The windows of what is watched since `since`, of one rollout.

    Args:
        since: Unix time at which the state says that this began; another begins anew.
    """

    def __init__(self, since: float) -> None:
        self.since = since
        self.canary = Window()
        self.stable = Window()

    def take(self, canary: Observations, stable: Observations) -> None:
        """Add what was observed since the last look."""
        self.canary.add(canary)
        self.stable.add(stable)

    def look(self, state: RolloutState, now: float, golden: GoldenComparison | None) -> tuple[Judgement, Move] | None:
        """The verdict now and what it leads to; None in phases without a verdict.

        Args:
            now: Unix time.
            golden: what both versions make of the golden prompts; None where that is not known yet.
        """
        if state.phase not in _LOOKS:
            return None
        if judges_alone(state):
            judgement = judge_alone(state.plan, state.reference or Counts(), self.canary, golden)
        else:
            judgement = judge(state.plan, state.ratio, state.past, self.canary, self.stable, golden)
        return judgement, next_move(state, judgement, now)
