"""Which stream a request gets, over calls that end when the test says so."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st
from piccard_gateway.kept_calls import KeptCalls


@dataclass(eq=False)
class Call:
    over: bool = False

    def done(self) -> bool:
        return self.over

    def cancel(self) -> None:
        self.over = True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_call_serves_one_request_after_the_other() -> None:
    kept = KeptCalls(Call)
    first, second = kept.take(), kept.take()
    assert first is not second
    kept.give_back(first)
    kept.give_back(second)
    assert kept.take() is second
    assert kept.take() is first
    assert kept.take() not in (first, second)


def test_one_that_the_server_ended_is_not_used_again() -> None:
    kept = KeptCalls(Call)
    call = kept.take()
    kept.give_back(call)
    call.over = True
    assert kept.take() is not call


def test_what_nobody_used_for_long_is_ended() -> None:
    clock = Clock()
    kept = KeptCalls(Call, seconds=10.0, clock=clock)
    old, new = kept.take(), kept.take()
    kept.give_back(old)
    clock.now = 11.0
    kept.give_back(new)
    assert (old.over, new.over) == (True, False)


@given(st.lists(st.sampled_from(["take", "give", "break", "wait"]), max_size=80))
def test_no_call_serves_two_and_none_is_left_open(actions: list[str]) -> None:
    clock, made = Clock(), []

    def start() -> Call:
        made.append(Call())
        return made[-1]

    kept = KeptCalls(start, most=3, seconds=10.0, clock=clock)
    out: list[Call] = []
    for action in actions:
        if action == "take":
            call = kept.take()
            assert call not in out
            assert not call.over
            out.append(call)
        elif action == "give" and out:
            kept.give_back(out.pop(0))
        elif action == "break" and made:
            made[-1].over = True
        elif action == "wait":
            clock.now += 4.0
        waiting = [call for call in made if call not in out and not call.over]
        assert len(waiting) <= 3
    kept.close()
    assert all(call.over for call in made if call not in out)
