"""A server that ends by itself is started again, with growing pauses, until that is no use."""

import errno
import io
import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest
from piccard.end_signals import end_signals
from piccard.errors import OperationError
from piccard.restarts import LIMIT, run_again
from piccard.revival import GOOD_LIFE
from piccard.supervisor import print_line


class Lives:
    """Plays one outcome a run: an exit code, or an error; and keeps time."""

    def __init__(self, *outcomes: tuple[float, int | Exception]) -> None:
        self._outcomes: Iterator[tuple[float, int | Exception]] = iter(outcomes)
        self.now = 0.0
        self.pauses: list[float] = []
        self.told: list[str] = []

    def run(self) -> int:
        seconds, outcome = next(self._outcomes)
        self.now += seconds
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def end(self) -> None:
        raise AssertionError("nobody told it to end")

    def pause(self, seconds: float) -> bool:
        self.pauses.append(seconds)
        return False

    def again(self, pause: Callable[[float], bool] | None = None) -> int:
        return run_again(lambda: self, self.told.append, clock=lambda: self.now, pause=pause or self.pause)


def test_what_was_told_to_end_is_not_started_again() -> None:
    lives = Lives((5.0, 0))

    assert lives.again() == 0
    assert lives.pauses == []


def test_what_ended_by_itself_is_started_again() -> None:
    lives = Lives((5.0, 1), (5.0, 1), (5.0, 0))

    assert lives.again() == 0
    assert lives.pauses == [1.0, 2.0]


def test_a_good_run_forgets_the_bad_ones() -> None:
    lives = Lives((5.0, 1), (5.0, 1), (GOOD_LIFE, 1), (5.0, 0))

    assert lives.again() == 0
    assert lives.pauses == [1.0, 2.0, 1.0]


def test_it_is_given_up_after_too_many_bad_runs() -> None:
    lives = Lives(*[(5.0, 1)] * LIMIT)

    assert lives.again() == 1
    assert len(lives.pauses) == LIMIT - 1
    assert "look at its log" in lives.told[-1]


def test_what_is_missing_at_the_first_start_is_raised() -> None:
    lives = Lives((0.0, OperationError("port 8000 is taken")))

    with pytest.raises(OperationError, match="8000"):
        lives.again()


def test_what_is_missing_later_is_told_and_tried_again() -> None:
    lives = Lives((5.0, 1), (0.0, OperationError("port 8000 is taken")), (5.0, 0))

    assert lives.again() == 0
    assert "port 8000 is taken" in lives.told


def test_a_signal_in_the_pause_ends_it() -> None:
    lives = Lives((5.0, 1))

    assert lives.again(pause=lambda _: True) == 0


@pytest.mark.parametrize("moment", ["made", "begun", "over", "paused"])
def test_a_signal_ends_it_whenever_it_comes(moment: str) -> None:
    """As a run is made, as it begins, after it has ended by itself, and in the pause: no other is made."""

    class Told:
        """Ends by itself, unless it is told to end within its life."""

        def __init__(self) -> None:
            self.ending = threading.Event()
            self._interrupt("made")

        def run(self) -> int:
            self._interrupt("begun")
            if self.ending.wait(5.0 if moment == "begun" else 0.0):
                return 0
            self._interrupt("over")
            return 1

        def end(self) -> None:
            self.ending.set()

        @staticmethod
        def _interrupt(here: str) -> None:
            if here == moment:
                os.kill(os.getpid(), signal.SIGTERM)

    made: list[Told] = []

    def make() -> Told:
        made.append(Told())
        return made[-1]

    def tell(line: str) -> None:
        if moment == "paused":
            assert line == "starting it again in 1 s"
            os.kill(os.getpid(), signal.SIGTERM)

    before = [signal.getsignal(number) for number in end_signals()]
    assert run_again(make, tell) == 0
    assert len(made) == 1
    assert [signal.getsignal(number) for number in end_signals()] == before


def test_a_terminal_that_is_gone_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("sys.stdout", Gone())
    print_line("ending")
    print_line("ended")
