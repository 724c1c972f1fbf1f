"""A step ends early once all of its requests have left, and not before."""

import threading

import pytest
from deepseek_engine.departures import Departures, Interrupt, StepGivenUpError
from hypothesis import given
from hypothesis import strategies as st

IDS = st.sampled_from("abcd")
EVENTS = st.lists(st.tuples(st.sampled_from(["add", "remove"]), IDS), max_size=12)


def is_set(interrupt: Interrupt) -> bool:
    try:
        interrupt.check()
    except StepGivenUpError:
        return True
    return False


@given(before=EVENTS, within=EVENTS, step=st.frozensets(IDS, min_size=1))
def test_a_step_is_given_up_once_all_of_its_requests_are_leaving(
    before: list[tuple[str, str]], within: list[tuple[str, str]], step: frozenset[str]
) -> None:
    departures, leaving = Departures(), set[str]()

    def happens(what: str, one: str) -> None:
        getattr(departures, what)(one)
        leaving.add(one) if what == "add" else leaving.discard(one)

    for event in before:
        happens(*event)
    with departures.interrupting(step) as interrupt:
        expected = step <= leaving
        assert is_set(interrupt) == expected
        for event in within:
            happens(*event)
            # Who left once does not come back into the step.
            expected = expected or step <= leaving
            assert is_set(interrupt) == expected
    for one in step:
        departures.add(one)
    assert is_set(interrupt) == expected


@pytest.mark.parametrize("early", [True, False])
def test_what_is_stopped_is_told_once_and_raises_that_it_was_given_up(early: bool) -> None:
    interrupt, stops = Interrupt(), list[str]()
    if early:
        interrupt.set()

    def work() -> None:
        with interrupt.stopping(lambda: stops.append("stop")):
            if not early:
                interrupt.set()
            raise RuntimeError("the flag was set")

    with pytest.raises(StepGivenUpError) as raised:
        work()
    assert isinstance(raised.value.__cause__, RuntimeError)
    interrupt.set()
    assert stops == ["stop"]


def test_what_fails_by_itself_says_so() -> None:
    interrupt, stops = Interrupt(), list[str]()
    with pytest.raises(ZeroDivisionError), interrupt.stopping(lambda: stops.append("stop")):
        raise ZeroDivisionError
    with interrupt.stopping(lambda: stops.append("stop")):
        pass
    interrupt.set()
    assert stops == []


def test_another_thread_may_set_it() -> None:
    departures, left = Departures(), threading.Event()
    with departures.interrupting(frozenset({"a"})) as interrupt, interrupt.stopping(left.set):
        threading.Thread(target=departures.add, args=("a",)).start()
        assert left.wait(60)
        with pytest.raises(StepGivenUpError):
            interrupt.check()
