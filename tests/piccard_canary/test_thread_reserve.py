"""Threads are used again, and work never waits for one."""

import threading

from patience import wait_until
from piccard_canary.thread_reserve import ThreadReserve


def test_a_thread_is_used_again() -> None:
    reserve = ThreadReserve("test")
    used: set[int] = set()
    for _ in range(20):
        done = threading.Event()

        def work(done: threading.Event = done) -> None:
            used.add(threading.get_ident())
            done.set()

        reserve.run(work)
        assert done.wait(60)
        wait_until(lambda: reserve._idle)

    assert len(used) == 1


def test_blocked_work_keeps_no_other_waiting() -> None:
    reserve = ThreadReserve("test", keep=2)
    release = threading.Event()
    running = threading.Barrier(9)

    def work() -> None:
        running.wait(60)
        release.wait(60)

    for _ in range(8):
        reserve.run(work)
    running.wait(60)
    release.set()
    wait_until(lambda: reserve._idle == 2)
    assert reserve._idle == 2


def test_work_is_never_left_lying() -> None:
    """Bursts, with threads that come to rest in between."""
    reserve = ThreadReserve("test", keep=4)
    done = threading.Semaphore(0)
    for burst in (1, 8, 3, 16, 2, 16):
        for _ in range(burst):
            reserve.run(done.release)
        for _ in range(burst):
            assert done.acquire(timeout=60)

    assert reserve._waiting.empty()


def test_a_waiting_thread_holds_nothing() -> None:
    import weakref

    class Held:
        pass

    reserve, held = ThreadReserve("test"), Held()
    seen = weakref.ref(held)
    reserve.run(lambda held=held: None)  # type: ignore[misc]
    del held
    wait_until(lambda: reserve._idle)

    assert seen() is None
