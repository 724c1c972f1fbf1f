"""Whoever holds a lock is alive, and a death is seen at once, whatever kind it was."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from piccard_contract.process_lock import AlreadyHeldError, ProcessLock, holder_pid, is_held

HOLD = """
import sys, time
from pathlib import Path
from piccard_contract.process_lock import ProcessLock
lock = ProcessLock(Path(sys.argv[1]))
lock.acquire()
print("held", flush=True)
time.sleep(600)
"""


def holder(path: Path) -> "subprocess.Popen[str]":
    """A process that holds the lock at `path`."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_death_frees_the_lock(tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "run" / "version-2.lock"
    process = holder(path)
    assert is_held(path)
    assert holder_pid(path) == process.pid

    process.send_signal(number)
    process.wait()

    assert not is_held(path)
    assert holder_pid(path) is None


def test_only_one_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "router.lock"
    process = holder(path)

    with pytest.raises(AlreadyHeldError, match=str(process.pid)):
        ProcessLock(path).acquire(timeout=0.05)

    process.kill()
    process.wait()
    lock = ProcessLock(path)
    lock.acquire()
    assert is_held(path)
    lock.release()
    assert not is_held(path)


def test_release_twice_does_nothing(tmp_path: Path) -> None:
    lock = ProcessLock(tmp_path / "a.lock")
    lock.release()
    lock.acquire()
    lock.release()
    lock.release()

    assert not is_held(tmp_path / "a.lock")


def test_no_file_is_no_holder(tmp_path: Path) -> None:
    assert not is_held(tmp_path / "never")
    assert holder_pid(tmp_path / "never") is None


def test_looking_never_keeps_a_process_from_its_lock(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            is_held(path)

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            lock = ProcessLock(path)
            lock.acquire(timeout=60)
            lock.release()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
