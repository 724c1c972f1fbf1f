"""A process that hangs is told from one that works, is idle, or was not looked at."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from piccard.stillness import MOST_A_LOOK, Signs, Stillness

IDLE = Signs(pid=7, updated_at=0.0, busy=False, beats=10)


def watched(seconds: float, signs: list[Signs]) -> float:
    """What looks at `signs`, one every `seconds`, say in the end."""
    stillness = Stillness()
    found = 0.0
    for index, seen in enumerate(signs):
        found = stillness.look(1000 + index * seconds, seen)
    return found


def test_idle_is_no_hang() -> None:
    assert watched(0.5, [replace(IDLE, updated_at=float(n)) for n in range(200)]) == 0.0


def test_a_long_step_whose_layers_end_is_no_hang() -> None:
    assert watched(0.5, [Signs(7, float(n), busy=True, beats=n // 2) for n in range(200)]) <= 0.5


def test_a_step_that_does_not_end_is_one() -> None:
    assert watched(0.5, [Signs(7, float(n), busy=True, beats=3) for n in range(61)]) == 30.0


def test_a_process_that_publishes_nothing_is_one() -> None:
    assert watched(0.5, [IDLE] * 61) == 30.0


def test_another_process_begins_anew() -> None:
    signs = [IDLE] * 50 + [replace(IDLE, pid=8)] * 3
    assert watched(0.5, signs) == 1.0


def test_a_sleep_of_the_machine_counts_as_one_look() -> None:
    stillness = Stillness()
    stillness.look(0.0, IDLE)
    assert stillness.look(3600.0, IDLE) == MOST_A_LOOK


@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.booleans(), st.booleans(), st.booleans()), max_size=80))
def test_never_more_than_was_seen(looks: list[tuple[float, bool, bool, bool]]) -> None:
    """It says at most the time since the last sign of life, counted in looks of at most two seconds."""
    stillness = Stillness()
    time = updated = bound = 0.0
    beats = 0
    for index, (passed, busy, publishes, beat) in enumerate(looks):
        time, updated, beats = time + passed, updated + publishes, beats + beat
        moved = publishes and (beat or not busy)
        bound = 0.0 if moved or index == 0 else bound + min(passed, MOST_A_LOOK)
        assert stillness.look(time, Signs(7, updated, busy, beats)) <= bound + 1e-6
