"""Announcements wait for their time, and none keeps another from being made."""

import threading

from canary_fakes import HandClock
from patience import PATIENCE
from piccard_canary.announcer import Announcer


def test_an_announcement_is_made_once_and_not_before_its_time() -> None:
    clock, told = HandClock(), []
    announcer = Announcer(print, delay=0.05, clock=clock)
    announcer.put(lambda: told.append("first"))
    clock.now += 0.03
    announcer.put(lambda: told.append("second"))

    assert announcer.look() == 2
    clock.now += 0.03
    assert announcer.look() == 1
    assert told == ["first"]
    clock.now += 0.03
    assert announcer.look() == 0
    assert told == ["first", "second"]
    clock.now += 1.0
    assert announcer.look() == 0
    assert told == ["first", "second"]


def test_one_that_fails_is_logged_and_the_next_is_made() -> None:
    clock, told, logged = HandClock(), [], []
    announcer = Announcer(logged.append, clock=clock)

    def fail() -> None:
        raise OSError("the client is gone")

    announcer.put(fail)
    announcer.put(lambda: told.append("next"))
    clock.now += 1.0

    assert announcer.look() == 0
    assert told == ["next"]
    assert "the client is gone" in logged[0]


def test_its_thread_tells_by_itself_and_ends() -> None:
    announcer = Announcer(print, delay=0.01, interval=0.001)
    announcer.start()
    for _ in range(3):
        told = threading.Event()
        announcer.put(told.set)
        assert told.wait(PATIENCE)
    announcer.stop()
    assert not any(thread.name == "announcer" and thread.is_alive() for thread in threading.enumerate())
