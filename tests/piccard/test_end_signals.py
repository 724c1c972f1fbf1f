"""Signals that end a process are heard whatever its main thread does."""

import os
import signal
import threading

from piccard.end_signals import EndSignals, end_signals


def test_a_terminal_that_closes_ends_it_unless_it_was_started_with_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert end_signals() == [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert end_signals() == [signal.SIGINT, signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_each_signal_is_heard_and_the_handlers_before_come_back() -> None:
    before = [signal.getsignal(number) for number in end_signals()]
    heard = threading.Semaphore(0)

    with EndSignals(heard.release):
        for number in end_signals():
            os.kill(os.getpid(), number)
            assert heard.acquire(timeout=10.0)

    assert [signal.getsignal(number) for number in end_signals()] == before
    assert not heard.acquire(blocking=False)


def test_a_signal_is_heard_by_one_who_holds_the_lock_of_what_it_sets() -> None:
    """As the main thread does for a moment in each wait for an event: a handler that sets it would never come back."""
    ending = threading.Event()

    with EndSignals(ending.set):
        with ending._cond:
            os.kill(os.getpid(), signal.SIGTERM)
            assert not ending.is_set()
        assert ending.wait(10.0)
