"""Golden prompts are asked beside the looks, until there is an answer, and then no more."""

import threading

from patience import PATIENCE
from piccard.rollout.golden_watch import GoldenWatch
from piccard.rollout.synthetic import Behaviour, golden_of
from piccard_canary.rollout.golden import GoldenComparison
from piccard_server import wait_for

GOOD = golden_of(Behaviour(), seed=0)
PROBLEM = GoldenComparison(problem="version 2 does not answer")


class Versions:
    """What comparisons give, one after the other; each waits until it may."""

    def __init__(self, *results: GoldenComparison | Exception) -> None:
        self.may = threading.Event()
        self.asked = 0
        self.ended: list[bool] = []
        self._results = list(results)

    def __call__(self, ending: threading.Event) -> GoldenComparison:
        self.asked += 1
        assert self.may.wait(PATIENCE)
        self.ended.append(ending.is_set())
        result = self._results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result


def test_no_look_waits() -> None:
    versions = Versions(GOOD)
    watch = GoldenWatch(versions)
    watch.ask()
    watch.ask()
    assert watch.found is None
    versions.may.set()
    assert wait_for(lambda: watch.found, PATIENCE, "the comparison") is GOOD
    for _ in range(10):
        watch.ask()
    assert versions.asked == 1


def test_what_has_a_problem_is_asked_again() -> None:
    versions = Versions(PROBLEM, RuntimeError("a defect"), GOOD)
    versions.may.set()
    watch = GoldenWatch(versions)
    told: list[str] = []

    def look() -> bool:
        watch.ask()
        found = watch.found
        if found is not None and found.problem and found.problem not in told:
            told.append(found.problem)
        return found is GOOD

    wait_for(look, PATIENCE, "the comparison without a problem")
    assert versions.asked == 3
    assert set(told) <= {PROBLEM.problem, "the golden prompts cannot be asked: RuntimeError('a defect')"}


def test_the_end_reaches_who_asks() -> None:
    versions = Versions(GOOD)
    watch = GoldenWatch(versions)
    watch.ask()
    watch.close()
    versions.may.set()
    wait_for(lambda: versions.ended, PATIENCE, "the end of the comparison")
    assert versions.ended == [True]
