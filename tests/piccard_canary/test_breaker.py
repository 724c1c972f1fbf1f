"""A breaker: when it opens, how it closes, and that no clock keeps it open."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from piccard_canary.breaker import Breaker, BreakerState, Cause, Turn
from piccard_canary.sliding_counts import Counts
from piccard_contract.policy import BreakerLimits

ROW = BreakerLimits(consecutive_errors=3, error_share=None)
SHARE = BreakerLimits(consecutive_errors=None, error_share=0.5, min_requests=10)


@given(st.lists(st.booleans(), max_size=60))
def test_errors_in_a_row_open_it(failures: list[bool]) -> None:
    breaker, row = Breaker(), 0
    for failed in failures:
        cause = breaker.record(1.0, ROW, failed=failed)
        row = row + 1 if failed else 0
        assert (cause is Cause.CONSECUTIVE_ERRORS) == (row == 3)
        if cause is not None:
            break
    assert breaker.state(1.0, ROW) is (BreakerState.OPEN if row == 3 else BreakerState.CLOSED)


@given(st.lists(st.booleans(), max_size=60), st.integers(0, 30), st.floats(0, 1))
def test_a_share_of_errors_in_all_routers_opens_it(failures: list[bool], elsewhere: int, share: float) -> None:
    others = Counts(elsewhere, round(elsewhere * share))
    breaker, seen, errors = Breaker(), elsewhere, others.events
    for failed in failures:
        cause = breaker.record(1.0, SHARE, failed=failed, others=others)
        seen, errors = seen + 1, errors + failed
        # A success opens nothing, whatever others say.
        opens = failed and seen >= 10 and 2 * errors >= seen
        assert (cause is Cause.ERROR_SHARE) == opens
        if opens:
            break


def test_old_errors_are_forgotten() -> None:
    breaker = Breaker()
    for _ in range(9):
        breaker.record(1.0, SHARE, failed=True)
    later = 1.0 + SHARE.window * 1.2
    assert breaker.record(later, SHARE, failed=True) is None
    assert breaker.counts(later, SHARE) == Counts(1, 1)


def opened(at: float = 10.0) -> Breaker:
    breaker = Breaker()
    for _ in range(3):
        breaker.record(at, ROW, failed=True)
    assert breaker.turn == Turn(at, open=True)
    return breaker


def test_it_half_opens_and_closes_after_its_probes() -> None:
    breaker = opened()
    assert breaker.state(19.9, ROW) is BreakerState.OPEN
    assert breaker.state(20.0, ROW) is BreakerState.HALF_OPEN
    for _ in range(ROW.probes - 1):
        assert breaker.settle(21.0, ROW, failed=False) is None
        assert breaker.state(21.0, ROW) is BreakerState.HALF_OPEN
    breaker.settle(22.0, ROW, failed=False)
    assert breaker.state(22.0, ROW) is BreakerState.CLOSED
    # It begins anew: one error is one.
    assert breaker.record(23.0, ROW, failed=True) is None


def test_a_probe_that_fails_opens_it_anew() -> None:
    breaker = opened()
    for _ in range(ROW.probes - 1):
        breaker.settle(21.0, ROW, failed=False)
    assert breaker.settle(22.0, ROW, failed=True) is Cause.PROBE
    assert breaker.state(31.9, ROW) is BreakerState.OPEN
    assert breaker.state(32.0, ROW) is BreakerState.HALF_OPEN
    # Those that went well before count no more.
    breaker.settle(33.0, ROW, failed=False)
    assert breaker.state(33.0, ROW) is BreakerState.HALF_OPEN


@pytest.mark.parametrize("failed", [False, True])
def test_what_ends_while_it_is_open_does_not_move_it(failed: bool) -> None:
    breaker = opened()
    for now in (11.0, 25.0):
        assert breaker.record(now, ROW, failed=failed) is None
    assert breaker.turn == Turn(10.0, open=True)


def test_it_can_be_switched_off_while_it_is_open() -> None:
    off = BreakerLimits(consecutive_errors=None, error_share=None)
    assert opened().state(11.0, off) is BreakerState.CLOSED


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=10))
def test_routers_agree_whatever_order_they_hear_in(turns: list[tuple[float, bool]]) -> None:
    told = [Turn(at, is_open) for at, is_open in dict(turns).items()]
    ends = set()
    for order in (told, told[::-1]):
        breaker = Breaker()
        for turn in order:
            breaker.adopt(200.0, turn)
        ends.add(breaker.turn)
    assert ends == {max([*told, Turn()], key=lambda turn: turn.at)}


def test_nobody_follows_into_the_future() -> None:
    breaker = Breaker()
    assert not breaker.adopt(5.0, Turn(6.0, open=True))
    assert breaker.state(6.0, ROW) is BreakerState.CLOSED


class AnyClock(RuleBasedStateMachine):
    """Anything happens to a breaker, at times that jump to and fro."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker()
        self.now = 1e6
        self.limits = ROW

    @rule(step=st.floats(-1e5, 1e5))
    def passes(self, step: float) -> None:
        self.now += step
        self.breaker.state(self.now, self.limits)

    @rule(failed=st.booleans())
    def ends(self, failed: bool) -> None:
        self.breaker.record(self.now, self.limits, failed=failed)

    @rule(failed=st.booleans())
    def probes(self, failed: bool) -> None:
        self.breaker.settle(self.now, self.limits, failed=failed)

    @rule(at=st.floats(-1e6, 2e6), is_open=st.booleans())
    def hears(self, at: float, is_open: bool) -> None:
        self.breaker.adopt(self.now, Turn(at, is_open))

    @rule(limits=st.sampled_from([ROW, SHARE]))
    def policy_changes(self, limits: BreakerLimits) -> None:
        self.limits = limits

    @invariant()
    def is_tried_again_in_time(self) -> None:
        turn = self.breaker.turn
        assert turn.at <= self.now
        if turn.open:
            later = self.now + self.limits.open_for
            assert later - turn.at >= self.limits.open_for * (1 - 1e-6)

    @invariant()
    def closed_is_never_over_its_limit(self) -> None:
        if not self.breaker.turn.open:
            counts = self.breaker.counts(self.now, self.limits)
            assert counts.events <= counts.requests


TestAnyClock = AnyClock.TestCase
