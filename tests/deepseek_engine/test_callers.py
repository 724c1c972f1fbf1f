"""What a version knows of the routers that called it."""

import os
from pathlib import Path

import pytest
from deepseek_engine.callers import Callers
from piccard_contract.process_lock import ProcessLock
from piccard_contract.receipts import Receipts, receipts_path
from piccard_contract.request import Attempt


@pytest.fixture
def callers(tmp_path: Path) -> Callers:
    return Callers(lambda owner: tmp_path / f"{owner}.lock")


def attempt(slot: int | None, process: int | None = None) -> Attempt:
    return Attempt(cancel_token="1.x", router="router", process=os.getpid() if process is None else process, slot=slot)


def test_what_a_router_took_is_known(callers: Callers, tmp_path: Path) -> None:
    lock = ProcessLock(tmp_path / "router.lock")
    lock.acquire()
    receipt = Receipts(receipts_path(lock.path)).open()
    asked = attempt(receipt.slot)
    assert callers.taken(asked)(0)
    assert not callers.taken(asked)(1)
    receipt.took()
    assert callers.taken(asked)(1)
    assert not callers.taken(asked)(2)
    # A router that died takes nothing more.
    lock.release()
    assert Callers(lambda owner: lock.path).taken(asked)(2)


def test_a_router_that_tells_nothing_is_not_waited_for(callers: Callers, tmp_path: Path) -> None:
    lock = ProcessLock(tmp_path / "router.lock")
    lock.acquire()
    assert callers.taken(attempt(None))(5)
    assert callers.taken(attempt(3))(5)
    Receipts(receipts_path(lock.path), slots=2)
    assert callers.taken(attempt(3))(5)
    assert not callers.taken(attempt(1))(5)
    lock.release()
